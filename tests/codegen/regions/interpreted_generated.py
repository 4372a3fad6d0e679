"""Runs a part of the generated kernels in Triton's interpreter; ``main`` gives {case: {output: error}}."""

import pytest
import torch

from arachnec.codegen.triton import lines as generated_tiles
from arachnec.codegen.triton import text as generated_text
from arachnec.codegen.triton.region import Generated
from tests.codegen.regions.generated_cases import CASES, region, sized


def errors(name: str, dtype: torch.dtype, sizes: dict[str, int]) -> dict[str, float]:
    """Relative errors against float64 of outputs and gradients."""
    function, shapes = CASES[name]
    run = Generated(region(function, shapes, dtype))
    torch.manual_seed(1)
    values = [torch.randn(sized(shape, sizes), dtype=dtype).requires_grad_() for shape in shapes]
    outputs = [y for results in [run(*values)] for y in (results if isinstance(results, tuple) else (results,))]
    exact = [v.detach().double().requires_grad_() for v in values]
    truth = [y for results in [function(*exact)] for y in (results if isinstance(results, tuple) else (results,))]
    out = [torch.randn_like(y) for y in outputs]
    gradients = torch.autograd.grad(outputs, values, out)
    true_gradients = torch.autograd.grad(truth, exact, [o.double() for o in out])
    pairs = zip([*outputs, *gradients], [*truth, *true_gradients], strict=True)
    return {
        str(k): float((a.detach().double() - b.detach()).abs().max() / b.detach().abs().max())
        for k, (a, b) in enumerate(pairs)
    }


def narrow() -> dict[str, dict[str, float]]:
    kinds = (
        ("fp32", torch.float32, ("row", "heads", "joined")),
        ("bf16", torch.bfloat16, ("joined", "activations")),
        ("fp16", torch.float16, ("joined",)),
    )
    sizes = {"B": 1, "S": 3, "T": 2}
    return {f"{kind} {name}": errors(name, dtype, sizes) for kind, dtype, names in kinds for name in names}


def blocks() -> dict[str, dict[str, float]]:
    sizes = {"B": 2, "S": 5, "T": 9}
    names = ("read elsewhere", "row", "loop", "caption", "attended", "as wide as clips")
    return {f"fp64 {name} in blocks": in_blocks(name, sizes) for name in names}


def in_blocks(name: str, sizes: dict[str, int]) -> dict[str, float]:
    """Rows that do not fit a tile are gone over in blocks, or each block is a program's."""
    kept = generated_text.WHOLE, generated_text.BLOCK, generated_tiles.BLOCK
    widths = generated_text.tilings_of_symbol
    generated_text.WHOLE, generated_text.BLOCK, generated_tiles.BLOCK = 8, 4, 4
    generated_text.tilings_of_symbol = lambda: {0: generated_tiles.Tiling(1, 0, 1, 4, loops=True)}
    try:
        return errors(name, torch.float64, sizes)
    finally:
        generated_text.WHOLE, generated_text.BLOCK, generated_tiles.BLOCK = kept
        generated_text.tilings_of_symbol = widths


def main(part: str, cache: str) -> dict[str, dict[str, float]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", cache)
        if part == "narrow":
            return narrow()
        if part == "blocks":
            return blocks()
        first, parts = (int(number) for number in part.split("/"))
        sizes = {"B": 2, "S": 5, "T": 3}
        return {f"fp64 {name}": errors(name, torch.float64, sizes) for name in [*CASES][first::parts]}
