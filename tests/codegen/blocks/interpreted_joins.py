"""Runs blocks whose regions are generated in Triton's interpreter; ``main`` gives {model: {what: error}}."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from arachnec.codegen import fused_block
from arachnec.codegen.fused_block import fused_blocks
from arachnec.codegen.triton.region import Generated, generated
from arachnec.fusion.fused_graph import fuse_graph
from arachnec.tracing.blocks import capture_blocks
from arachnec.tracing.graph import block_graph
from tests.codegen.blocks.test_fused_block import CASES, randomised, step
from tests.spmd.sequence_models import Size


def errors(name: str) -> dict[str, float]:
    """Of output and gradients, relative to the model's; and the regions that ran as generated kernels alone."""
    torch.manual_seed(0)
    case = CASES[name]
    model = randomised(case.build())
    captured = capture_blocks(model, case.examples(), verify=False)
    graphs = [fuse_graph(block_graph(block)) for block in captured.blocks]
    ran: set[int] = set()

    def compiler(region: fx.GraphModule) -> Callable[..., Any]:
        run = generated(region)

        def called(*values: Any) -> Any:
            if isinstance(run, Generated):
                ran.add(id(run))
            return run(*values)

        return called

    size = Size(2, 4, 6, Size().text if not case.text else 5, 1)  # every token is a program of the interpreter
    expected, gradients = step(case, model, size)
    gradients = {key: gradient.clone() for key, gradient in gradients.items()}
    with fused_blocks(model, captured, graphs, kernels=True, compiler=compiler):
        results, fused = step(case, model, size)
    norm = torch.linalg.vector_norm
    whole = norm(torch.stack([norm(gradient) for gradient in gradients.values()]))
    apart = [norm(fused[key] - g) / max(norm(g), 1e-3 * whole) for key, g in gradients.items()]
    return {
        "output": float((results - expected).abs().max()),
        "gradients": float(max(apart)),
        "generated": len(ran),
    }


def main(cache: str, *names: str) -> dict[str, dict[str, float]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", cache)
        patch.setattr(fused_block, "WORTH_COMPILING", 0)
        patch.setattr(fused_block, "FEWEST", 0)
        return {name: errors(name) for name in names}
