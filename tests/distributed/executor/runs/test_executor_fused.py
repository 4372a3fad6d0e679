"""`arachnec run` of a program with fused regions: the loss and gradients of a plain loop, whole, shared, recomputed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from arachnec.backends.torch_distributed.engine import train
from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.codegen import fused_block
from arachnec.codegen.fused_block import Region
from arachnec.executable.folder import read_executable, write_executable
from arachnec.fusion.fused_graph import fuse_graph
from arachnec.models.file import load_model_file
from arachnec.tracing.blocks import capture_blocks
from arachnec.tracing.graph import block_graph
from arachnec.tracing.sample import example_calls
from tests.distributed.executor_cases import Work, assert_same_gradients, clip, executable, plain_loop
from tests.distributed.harness import run_ranks
from tests.distributed.rank_device import rank_device
from tests.slow import quick

CLIPS = (clip("a", 3), clip("b", 3), clip("c", 5))
WORKS = [
    Work((0, 1), (0, 1), 0.0, attrs=(("recompute", True),)),
    Work((2,), (0,), 1.0),
]


def fused_executable(folder: Path) -> Path:
    executable(folder, [CLIPS], WORKS, 2)
    model_file = load_model_file(folder / "model.py")
    model = model_file.build()
    captured = capture_blocks(model, example_calls(model, model_file, CLIPS), verify=False)
    as_traced = tuple(map(block_graph, captured.blocks))
    graphs = tuple(map(fuse_graph, as_traced))
    assert all(graph.fused for graph in graphs)
    compiled = read_executable(folder)
    write_executable(
        folder,
        program=compiled.program,
        traced=replace(compiled.traced, graphs=as_traced),
        model=replace(compiled.traced, graphs=graphs),
        pipeline=compiled.header.pipeline,
        model_file=model_file,
        clips=compiled.clips,
        training=compiled.training,
    )
    return folder


def _train(folder: Path, options: RunOptions) -> None:
    """As a run does, on CPUs without a compiler's minutes; fails where no region was called."""
    called: list[str] = []
    fused_block.default_compiler = lambda: lambda region: region  # type: ignore[assignment]
    forward = Region.forward

    def noting(self: Region, *values: object) -> object:
        called.append(self.name)
        return forward(self, *values)

    Region.forward = noting  # type: ignore[method-assign]
    train(read_executable(folder), options, rank_device())
    assert called


@pytest.mark.parametrize("dtype", quick(["fp32", "bf16"], "fp32"))
def test_loss_and_gradients_are_those_of_a_plain_loop(tmp_path: Path, dtype: str) -> None:
    folder, saved = fused_executable(tmp_path / "program"), tmp_path / "gradients.safetensors"
    run_ranks(2, _train, folder, RunOptions(steps=1, save_gradients=saved, dtype=dtype))
    _, gradients = plain_loop(folder, CLIPS)
    assert_same_gradients(saved, gradients, 1e-5 if dtype == "fp32" else 5e-2)


def test_a_program_without_fused_graphs_runs_none(tmp_path: Path) -> None:
    folder = executable(tmp_path / "program", [CLIPS], WORKS, 2)
    assert read_executable(folder).fused_graphs() == ()
    fused = read_executable(fused_executable(tmp_path / "fused")).fused_graphs()
    assert fused and replace(fused[0], fused=()) != fused[0]
