"""Does Inductor's C++ help fused regions on a CPU? Forward and backward of each, eager and compiled.

    python benchmarks/fused_regions_cpu.py [tokens ...]

One Wan block of width 256, fp32. Prints the ms of each region, eager and compiled, and the seconds compiling took.
``WORTH_COMPILING`` and ``FEWEST`` in ``arachnec/codegen/fused_block.py`` are from this.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import Tensor

from arachnec.codegen import fused_block
from arachnec.codegen.fused_block import Region, fuse_block
from arachnec.fusion.fused_graph import fuse_graph
from arachnec.tracing.blocks import CapturedBlock, capture_blocks
from arachnec.tracing.captured import lifted
from arachnec.tracing.dims import B, S, T
from arachnec.tracing.graph import block_graph
from arachnec.tracing.record import ExampleCall

REPEATS = 5


def captured_block() -> tuple[Any, CapturedBlock]:
    model = WanTransformer3DModel(
        num_attention_heads=4, attention_head_dim=64, in_channels=4, out_channels=4, text_dim=32, freq_dim=32,
        ffn_dim=1024, num_layers=1,
    )  # fmt: skip

    def call(frames: int, width: int, batch: int, text: int) -> ExampleCall:
        arguments = {
            "hidden_states": torch.randn(batch, 4, frames, 8, width),
            "timestep": torch.linspace(1, 999, batch),
            "encoder_hidden_states": torch.randn(batch, text, 32),
        }
        return ExampleCall(arguments, (frames, 8, width), batch, text)

    examples = [call(3, 12, 2, 19), call(5, 8, 2, 19), call(3, 16, 2, 19), call(3, 12, 3, 19), call(3, 12, 2, 23)]
    return model.blocks[0], capture_blocks(model, examples, verify=False).blocks[0]


def calls_of(module: torch.fx.GraphModule, run: Callable[[], object]) -> dict[str, Sequence[Any]]:
    """What each region is called with."""
    arguments: dict[str, Sequence[Any]] = {}
    regions = [part for part in module.children() if isinstance(part, Region)]
    hooks = [part.register_forward_pre_hook(lambda m, args: arguments.update({m.name: args})) for part in regions]
    run()
    for hook in hooks:
        hook.remove()
    return arguments


def milliseconds(function: Callable[..., Any], values: Sequence[Any]) -> float:
    """The median of forward and backward."""
    times = []
    for _ in range(REPEATS + 1):
        given = [v.detach().requires_grad_(v.is_floating_point()) if isinstance(v, Tensor) else v for v in values]
        begin = time.perf_counter()
        result = function(*given)
        parts = result if isinstance(result, tuple) else (result,)
        torch.autograd.backward(parts, [torch.ones_like(part) for part in parts])
        times.append(1000 * (time.perf_counter() - begin))
    return sorted(times[1:])[REPEATS // 2]


def main() -> None:
    block, captured = captured_block()
    module = fuse_block(captured, fuse_graph(block_graph(captured)), kernels=False)
    run = lifted(captured, block, module)
    print(f"{torch.get_num_threads()} threads")
    for tokens in map(int, sys.argv[1:] or ["16", "128", "1024", "4096"]):
        sizes = {B: 2, S: tokens, T: 64}
        inputs = [torch.randn(*[int(size.subs(sizes)) for size in dims]) for dims in captured.input_dims]
        fused_block.WORTH_COMPILING = sys.maxsize
        given = calls_of(module, lambda inputs=inputs: run(*inputs))
        fused_block.WORTH_COMPILING = fused_block.FEWEST = 0
        for name, values in given.items():
            region = module.get_submodule(name)
            assert isinstance(region, Region)
            moved = sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))
            begin = time.perf_counter()
            region(*values)
            first = time.perf_counter() - begin
            eager, compiled = milliseconds(region.eager, values), milliseconds(region, values)
            print(
                f"S={tokens:6d} {name:8s} {moved / 2**20:8.2f} MiB in   eager {eager:8.3f} ms   "
                f"compiled {compiled:8.3f} ms   {eager / compiled:5.2f}x   first call {first:.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
