"""A pass of scope `model` runs once on the whole traced module, the others once per iteration, without graphs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import arachnec
from arachnec.backends.torch_distributed.plans.background_planner import IterationPlanner
from arachnec.executable.folder import read_executable
from arachnec.ir.parser import parse_file
from arachnec.passes import Pipeline, registry
from tests.commands.small_model import MODEL

PASSES = Path(__file__).parents[1] / "passes" / "scoped_passes.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An executable of two iterations, compiled for two ranks; `seen.txt` in it says what compiling ran."""
    place = tmp_path_factory.mktemp("scope")
    (place / "model.py").write_text(MODEL.replace("self.inner(x)", "self.inner(F.layer_norm(x, (8,)) * 2 + 1)"))
    rows = [{"frames": 9 + 8 * (k % 2), "height": 32, "width": 32 + 32 * (k // 2)} for k in range(4)]
    (place / "clips.jsonl").write_text("".join(json.dumps(row | {"text_tokens": 1}) + "\n" for row in rows))
    build = place / "build"
    build.mkdir()
    passes = f"fuse,note-model{{file={build}/seen.txt}},shard-optimizer,note-iteration{{file={build}/seen.txt}}"
    pipeline = Pipeline.parse(
        f"{passes},partition,annotate,schedule-static,place,lower,check",
        registry.load_file(PASSES, registry.installed()),
    )
    compiled = arachnec.compile(place / "model.py", place / "clips.jsonl", "2:cpu", passes=pipeline, batch=2)
    return compiled.write(build, load=[PASSES])


def test_compile_runs_the_model_part_once_on_everything_and_the_rest_on_iteration_0(folder: Path) -> None:
    assert seen(folder)[:2] == ["model [0, 1, 2, 3] graphs 2", "iteration [0, 1] none 2"]


def test_what_is_stored_is_the_module_as_traced_and_the_graphs_as_the_model_part_left_them(folder: Path) -> None:
    traced = read_executable(folder).traced
    assert traced.graphs and not any(graph.fused for graph in traced.graphs)
    assert [graph.name for graph in read_executable(folder).fused_graphs()] == [graph.name for graph in traced.graphs]
    assert not parse_file(folder / "program.cascade").graphs


COMPILED_FOR = 2


@pytest.mark.parametrize("world", [1, COMPILED_FOR, 4])
def test_the_planner_runs_the_model_part_once_for_other_ranks_than_it_was_compiled_for(
    folder: Path, world: int
) -> None:
    before = len(seen(folder))
    planner = IterationPlanner(read_executable(folder), world)
    plans = [planner.plan(number) for number in (0, 1, 0)]
    model = [f"model [0, 1, 2, 3] graphs {world}"]
    assert seen(folder)[before:] == [
        *(model if world != COMPILED_FOR else []),
        f"iteration [0, 1] none {world}",
        f"iteration [2, 3] none {world}",
        f"iteration [0, 1] none {world}",
    ]
    assert plans[0] == plans[2]
    assert not plans[0].graphs


def seen(folder: Path) -> list[str]:
    return (folder / "seen.txt").read_text().splitlines()
