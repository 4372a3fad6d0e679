"""Runs generated kernels in Triton's interpreter, in a process of its own: prints what it found as JSON."""

import json
import os
import tempfile

os.environ["TRITON_INTERPRET"] = "1"
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()

import torch

from arachnec.backends import generated_kernel
from arachnec.backends.generated_region import Generated
from tests.backends.generated_cases import CASES, region
from tests.kernels.triton_interpreter import let_one_element_be_an_index


def errors(name: str, dtype: torch.dtype, sizes: dict[str, int], tile: int = 8192) -> dict[str, float]:
    """Relative errors against float64 of outputs and gradients."""
    function, shapes = CASES[name]
    generated_kernel.TILE, generated_kernel.BLOCK = tile, min(tile, 4)
    run = Generated(region(function, shapes, dtype))
    torch.manual_seed(1)
    values = [torch.randn([sizes.get(d, d) for d in shape], dtype=dtype).requires_grad_() for shape in shapes]
    found = [y for results in [run(*values)] for y in (results if isinstance(results, tuple) else (results,))]
    exact = [v.detach().double().requires_grad_() for v in values]
    truth = [y for results in [function(*exact)] for y in (results if isinstance(results, tuple) else (results,))]
    out = [torch.randn_like(y) for y in found]
    gradients = torch.autograd.grad(found, values, out)
    true_gradients = torch.autograd.grad(truth, exact, [o.double() for o in out])
    pairs = zip([*found, *gradients], [*truth, *true_gradients], strict=True)
    return {
        str(k): float((a.detach().double() - b.detach()).abs().max() / b.detach().abs().max())
        for k, (a, b) in enumerate(pairs)
    }


def main() -> None:
    let_one_element_be_an_index()
    found = {f"fp64 {name}": errors(name, torch.float64, {"B": 2, "S": 5}) for name in CASES}
    found |= {f"fp32 {name} {tile}": errors(name, torch.float32, {"B": 1, "S": 3}, tile)
              for name, tile in (("row", 8192), ("heads", 8192))}  # fmt: skip
    found |= {"fp64 two passes": two_passes()}
    print(json.dumps(found))


def two_passes() -> dict[str, float]:
    """Rows that do not fit a tile: the forward goes over them in blocks."""
    function, shapes = CASES["read elsewhere"]
    generated_kernel.TILE, generated_kernel.BLOCK = 8, 4
    run = Generated(region(function, shapes, torch.float64))
    assert run.forward.launcher is not None and run.forward.launcher.source.wide
    values = [torch.randn([{"B": 2, "S": 5}.get(d, d) for d in shape], dtype=torch.float64) for shape in shapes]
    pairs = zip(run(*values), function(*values), strict=True)
    return {str(k): float((a.detach() - b).abs().max() / b.abs().max()) for k, (a, b) in enumerate(pairs)}


if __name__ == "__main__":
    main()
