"""All-reduces inside last backwards, where replicas of a stage share the stages before: no rank holds up another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.analysis.uses import COMPUTE, overlapped_reduces
from arachnec.backends.simulator import simulate
from arachnec.driver import plan_iteration, plan_model
from arachnec.ir.nodes import Instruction, Module, Program, integers, quantity
from arachnec.ir.values import Quantity
from arachnec.lowering.order import global_order
from arachnec.passes.check import find_problems
from arachnec.passes.infra.pipeline import Pipeline
from tests.distributed.executor_cases import clip
from tests.distributed.pipeline_cases import figures, pipeline_of, traced

LAYERS = 4


def compiled(frames: list[int], cuts: list[int], replicas: list[int], policy: str) -> Module:
    """Lowered, and checked: a stage's every layer has a bucket of its own."""
    stages = f"cuts={cuts},replicas={replicas}".replace(" ", "")
    return by_passes(sum(replicas), frames, pipeline_of(stages, f"schedule=dapple,policy={policy}"))


def by_passes(world: int, frames: list[int], passes: str) -> Module:
    module = traced(world, [[clip(str(number), count) for number, count in enumerate(frames)]])
    (stage,) = module.stages
    blocks = figures({"Block": [f"blocks.{n}" for n in range(LAYERS)]})
    stage = replace(stage, attrs=stage.attrs.updated(**dict(blocks.pairs), tied_layers=None))
    pipeline = Pipeline.parse(passes)
    model, _ = plan_model(replace(module, stages=(stage,)), pipeline)
    return plan_iteration(model, pipeline, 0)[0]


def starts_inside(program: Program) -> bool:
    return any("early" in step.attrs for step in program.instructions if step.op == "reduce")


def insides(program: Program) -> dict[str, list[tuple[int, ...]]]:
    """The operation inside which buckets start, and their layers."""
    steps = program.instructions
    return {
        steps[at].op: [integers(steps[number].attrs["layers"]) for number in numbers]
        for at, numbers in overlapped_reduces(program).items()
    }


def test_a_replica_whose_gradient_another_waits_for_sums_behind_its_backward() -> None:
    """Rank 0 takes what rank 2 hands back before what rank 1 does, which is before rank 1's last backward."""
    module = compiled([60, 25, 40], [1], [1, 2], "A")
    assert [starts_inside(program) for program in module.programs] == [False, True, False]


def test_replicas_that_do_not_wait_for_each_other_sum_inside_their_last_backwards() -> None:
    module = compiled([9, 9], [1], [1, 2], "A")
    assert [starts_inside(program) for program in module.programs] == [False, True, True]


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], str]:
    stages = draw(st.integers(2, LAYERS))
    cuts = sorted(draw(st.permutations(range(1, LAYERS)))[: stages - 1])
    replicas = draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))
    frames = draw(st.lists(st.integers(1, 60), min_size=1, max_size=9))
    return frames, cuts, replicas, draw(st.sampled_from("AB"))


@settings(max_examples=30, deadline=None)
@given(pipelines())
def test_every_pipeline_with_replicas_passes_check(case: tuple[list[int], list[int], list[int], str]) -> None:
    module = compiled(*case)
    assert {program.rank for program in module.programs} == set(range(sum(case[2])))


SPLIT = {  # ranks, what to cut, the schedule, ranks of a cell
    "zb-h1": (4, "p=2", "schedule=zb-h1,degree=1", 1),
    "zb-h2": (4, "cuts=[1],replicas=[2,2]", "schedule=zb-h2", 1),
    "planned": (4, "p=2", "schedule=planned,degree=1", 1),
    "degrees": (8, "p=2", "schedule=zb-h1,degree=2", 1),
    "cells": (8, "p=2", "schedule=zb-h1", 2),
    "zb-v": (4, "p=4", "schedule=zb-v,degree=1", 1),
    "zb-v-cells": (8, "p=4", "schedule=zb-v", 2),
    "interleaved": (4, "p=4", "schedule=interleaved-1f1b,degree=1", 1),
}


def split(case: str, frames: list[int]) -> Module:
    world, stages, schedule, cell = SPLIT[case]
    return by_passes(world, frames, pipeline_of(stages, schedule, cell=cell))


def test_buckets_of_a_split_backward_start_inside_the_last_weight_of_their_rank() -> None:
    for case in ("zb-h1", "planned", "cells"):
        for program in split(case, [9, 4, 6, 3, 5, 2]).programs:
            assert insides(program) == {"weight": [(1,), (0,)]}, case
            numbers = [n for n, step in enumerate(program.instructions) if step.op == "weight"]
            assert list(overlapped_reduces(program)) == numbers[-1:], case


def test_on_a_rank_with_several_stages_only_those_of_the_stage_that_ends_it_do() -> None:
    module = split("zb-v", [9, 9, 9, 9])
    assert all(insides(program) == {"weight": [(0,)]} for program in module.programs)
    for program in module.programs:
        targets = [step.target for step in program.instructions if step.op == "reduce"]
        assert len(set(targets)) == 2 and targets == sorted(targets, key=targets.index)  # one stage after the other


@pytest.mark.parametrize("case", ["zb-v", "zb-v-cells", "interleaved"])
def test_gradients_of_a_rank_with_several_stages_are_summed_behind_the_last_of_their_stage(case: str) -> None:
    """Before all that comes later in the plan, of whatever stage: that hides it."""
    module = split(case, [9] * 8)
    order = {cascade.name: place for place, cascade in enumerate(global_order(module.cascades))}
    stage_of = {cascade.name: cascade.stage for cascade in module.cascades}
    ending = {
        stage.name: max(order[c.name] for c in module.cascades if c.stage == stage.name) for stage in module.stages
    }
    between = 0
    for program in module.programs:
        steps = program.instructions
        assert len({stage_of[step.target] for step in steps if step.op == "forward"}) == 2
        for at, step in enumerate(steps):
            if step.op != "reduce":
                continue
            before = [order[other.target] for other in steps[:at] if other.op in COMPUTE]
            behind = [order[other.target] for other in steps[at:] if other.op in COMPUTE]
            assert max(before) <= ending[step.target] < min(behind, default=len(order))
            between += bool(behind)
    assert between >= len(module.programs), "some come before other stages' cascades"


@pytest.mark.parametrize("case", ["zb-h1", "planned", "cells", "degrees"])
def test_nothing_stands_behind_the_reduces_of_a_rank_with_one_stage_but_what_ends_the_step(case: str) -> None:
    for program in split(case, [9, 4, 6, 3, 5, 2]).programs:
        ops = [step.op for step in program.instructions]
        assert {*ops[ops.index("reduce") :]} <= {"reduce", "norm", "step"}


def test_a_bucket_in_a_weight_starts_when_its_layers_have_their_gradients() -> None:
    """Two layers: the last one's gradients are there after half of it; and the simulator has a step no longer."""
    module = split("zb-h1", [9, 4, 6, 3, 5, 2])
    for program in module.programs:
        last = [step for step in program.instructions if step.op == "weight"][-1]
        early = [quantity(s.attrs["early"]) for s in program.instructions if "early" in s.attrs]
        assert early == [quantity(last.attrs["time"]) / 2, 0.0]
    late = tuple(replace(p, instructions=tuple(map(behind, p.instructions))) for p in module.programs)
    assert simulate(module).iteration_ms <= simulate(replace(module, programs=late)).iteration_ms


def behind(step: Instruction) -> Instruction:
    """A reduce that starts where it stands."""
    return replace(step, attrs=step.attrs.updated(early=None))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(sorted(SPLIT)), st.lists(st.integers(1, 60), min_size=2, max_size=12))
def test_every_split_pipeline_passes_check(case: str, frames: list[int]) -> None:
    if case == "interleaved":  # micro-batches come in equal rounds
        frames = (frames * 8)[: 8 * (len(frames) // 8 + 1)]
    assert not find_problems(split(case, frames))


def moved_up(items: list[Instruction]) -> None:
    """The first early reduce starts inside the weight before."""
    at = next(n for n, step in enumerate(items) if "early" in step.attrs)
    last = max(n for n, step in enumerate(items) if step.op == "weight")
    items.insert(last, items.pop(at))


def swapped(items: list[Instruction]) -> None:
    first, second = [n for n, step in enumerate(items) if step.op == "reduce" and "layers" in step.attrs][:2]
    items[first], items[second] = items[second], items[first]


def dropped(items: list[Instruction]) -> None:
    del items[next(n for n, step in enumerate(items) if "early" in step.attrs)]


def too_early(items: list[Instruction]) -> None:
    at = next(n for n, step in enumerate(items) if "early" in step.attrs)
    items[at] = replace(items[at], attrs=items[at].attrs.updated(early=Quantity(1e6, "ms")))


def rest_inside(items: list[Instruction]) -> None:
    at = next(n for n, step in enumerate(items) if step.attrs.get("rest") is True)
    items[at] = replace(items[at], attrs=items[at].attrs.updated(early=Quantity(0.0, "ms")))


WRONG: dict[Callable[[list[Instruction]], None], set[str]] = {
    moved_up: {"not reduced"},
    swapped: {"deadlock", "wrong start"},
    dropped: {"wrong bucket layers"},
    too_early: {"wrong start"},
    rest_inside: {"wrong start"},
}


@settings(max_examples=15, deadline=None)
@given(
    case=st.sampled_from(["zb-h1", "planned", "cells", "degrees"]),
    frames=st.lists(st.integers(1, 60), min_size=4, max_size=9),
    rank=st.integers(0, 3),
)
def test_one_rank_with_other_buckets_in_its_last_weight_is_rejected(case: str, frames: list[int], rank: int) -> None:
    module = split(case, frames)
    assert insides(module.programs[rank])["weight"]
    for change, expected in WRONG.items():
        items = list(module.programs[rank].instructions)
        change(items)
        broken = tuple(replace(p, instructions=tuple(items)) if p.rank == rank else p for p in module.programs)
        problems = {problem.kind for problem in find_problems(replace(module, programs=broken))}
        assert problems & expected, change.__name__
