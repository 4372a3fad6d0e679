"""A program of an executable trains that executable's clips and stages, on its cluster, and no others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from arachnec.cost.profile import LinkProfile, Profile
from arachnec.executable.folder import read_executable
from arachnec.executable.program_input import demand_own_input
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Module
from arachnec.ir.values import Quantity
from arachnec.passes.annotate import with_measured_links
from tests.distributed.executor_cases import Work, clip, executable

CLIPS = (clip("a", 3), clip("b", 5))
LATER = (clip("c", 3),)
WORKS = [Work((0,), (0,), 0.0), Work((1,), (1,), 0.0)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return executable(tmp_path_factory.mktemp("build"), [CLIPS, LATER], WORKS, 2)


def one_clip_less(module: Module) -> Module:
    return replace(module, clips=module.clips[1:])


def a_clip_more(module: Module) -> Module:
    return replace(module, clips=(*module.clips, replace(module.clips[0], id=2)))


def a_shorter_clip(module: Module) -> Module:
    return replace(module, clips=(replace(module.clips[0], tokens=1), *module.clips[1:]))


def a_frozen_stage(module: Module) -> Module:
    return replace(module, stages=tuple(replace(stage, trained=False) for stage in module.stages))


def no_stage(module: Module) -> Module:
    return replace(module, stages=module.stages[:-1])


def less_state(module: Module) -> Module:
    stage = module.stages[-1]
    less = replace(stage, attrs=stage.attrs.updated(state=Quantity(0.0, "GiB")))
    return replace(module, stages=(*module.stages[:-1], less))


def more_memory(module: Module) -> Module:
    assert module.cluster is not None
    attrs = module.cluster.attrs.updated(memory=Quantity(1e6, "GiB"))
    return replace(module, cluster=replace(module.cluster, attrs=attrs))


def memory_of_a_host(module: Module) -> Module:
    assert module.cluster is not None
    attrs = module.cluster.attrs.updated(host_memory=Quantity(1e6, "GiB"))
    return replace(module, cluster=replace(module.cluster, attrs=attrs))


def a_stage_in_cells(module: Module) -> Module:
    stage = module.stages[-1]
    return replace(module, stages=(*module.stages[:-1], replace(stage, attrs=stage.attrs.updated(cell=2))))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (one_clip_less, "of iteration 0 leaves out clip"),
        (a_clip_more, "of iteration 0 has clip"),
        (a_shorter_clip, "of iteration 0 has clip"),
        (a_frozen_stage, "has phase = "),
        (no_stage, "has stages"),
        (less_state, "has state = "),
        (more_memory, "has memory = "),
        (memory_of_a_host, "has host_memory = "),
        (a_stage_in_cells, "has cell = "),
    ],
)
def test_a_program_for_other_input_is_refused(folder: Path, broken: Callable[[Module], Module], message: str) -> None:
    compiled = read_executable(folder)
    demand_own_input(compiled, compiled.program, 0)
    with pytest.raises(UserError, match=message) as caught:
        demand_own_input(compiled, broken(compiled.program), 0)
    assert len(caught.value.diagnostics) == 1


def test_the_program_of_another_iteration_is_refused(folder: Path) -> None:
    compiled = read_executable(folder)
    with pytest.raises(UserError, match="has clip 0, which is none of its batch"):
        demand_own_input(compiled, compiled.program, 1)


def test_a_plan_need_not_repeat_which_layers_are_tied(folder: Path) -> None:
    compiled = read_executable(folder)
    *others, stage = compiled.model.stages
    tied = replace(stage, attrs=stage.attrs.updated(tied_layers=(((0, 1), 12),)))
    demand_own_input(replace(compiled, model=replace(compiled.model, stages=(*others, tied))), compiled.program, 0)


def test_a_plan_may_rest_on_links_that_a_profile_measured(folder: Path) -> None:
    compiled = read_executable(folder)
    assert compiled.program.cluster is not None
    links = LinkProfile(latency=3.0, intra=0.2, all_reduce=0.1)
    measured = with_measured_links(compiled.program.cluster, Profile("here", "cpu", [], links))
    assert measured != compiled.program.cluster
    demand_own_input(compiled, replace(compiled.program, cluster=measured), 0)
