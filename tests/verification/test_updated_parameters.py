"""``check`` accepts no program that reads a layer before its update was gathered, and none that stands still there."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

from hypothesis import given
from hypothesis import strategies as st

from arachnec.analysis.execution_model import HOST_HANDOFFS
from arachnec.analysis.receive_prefetch import prefetched_receives
from arachnec.analysis.uses import Values
from arachnec.ir.nodes import Instruction, Module
from arachnec.passes.check import find_problems
from tests.distributed.executor_cases import Work, clip, lowered, traced
from tests.emulator.machine import Machine, Standstill
from tests.emulator.translate import Backend, actions_of

LAYERS = (("blocks.0", 1236), ("blocks.1", 1236))
CLIPS = (clip("a", 3), clip("b", 5), clip("c", 3), clip("d", 7))
WORKS = (Work((0,), (0,), 0.0), Work((1,), (1,), 0.0), Work((2,), (0, 1), 1.0), Work((3,), (2,), 2.0))  # 3 has nothing
WORLD = 4


@cache
def program() -> Module:
    source = traced(WORLD, [CLIPS])
    attrs = {"layers": LAYERS, "params": 2614, "sharded": WORLD}
    stages = tuple(replace(stage, attrs=stage.attrs.updated(**attrs)) for stage in source.stages)
    return lowered(replace(source, stages=stages), WORKS)


def with_list(module: Module, rank: int, instructions: list[Instruction]) -> Module:
    programs = list(module.programs)
    programs[rank] = replace(programs[rank], instructions=tuple(instructions))
    return replace(module, programs=tuple(programs))


def emulate(module: Module, seed: int) -> Standstill | None:
    values = Values(module)
    prefetched = prefetched_receives(values, HOST_HANDOFFS, 4.0)
    return Machine(actions_of(values, prefetched, Backend("host")), 2, 1.0, random.Random(seed)).run()


def reads_in_time(module: Module) -> bool:
    """Every rank gathers all layers once, before its first forward."""
    for own in module.programs:
        ops = [step.op for step in own.instructions]
        forward = ops.index("forward") if "forward" in ops else len(ops)
        layers = [n for step in own.instructions[:forward] if step.op == "gather" for n in step.attrs["layers"]]  # type: ignore[union-attr]
        if sorted(layers) != [0, 1, 2] or ops.count("gather") > 1:
            return False
    return True


def test_a_program_begins_with_the_gather_of_all_layers_in_the_order_in_which_they_are_read() -> None:
    module = program()
    assert not find_problems(module)
    assert [p.instructions[0].attrs["layers"] for p in module.programs] == [(2, 0, 1)] * WORLD
    assert emulate(module, 0) is None


@given(st.integers(0, WORLD - 1), st.integers(1, 6), st.integers(0, 99))
def test_a_gather_that_moved_is_refused_where_it_comes_too_late_or_nobody_comes_through(
    rank: int, to: int, seed: int
) -> None:
    steps = list(program().programs[rank].instructions)
    gather = steps.pop(0)
    steps.insert(to, gather)
    moved = with_list(program(), rank, steps)
    if not find_problems(moved):
        assert reads_in_time(moved)
        assert emulate(moved, seed) is None


layer_lists = st.lists(st.integers(0, 3), max_size=4).map(tuple)


@given(st.integers(0, WORLD - 1), layer_lists)
def test_a_rank_that_gathers_other_layers_than_the_rest_is_refused(rank: int, layers: tuple[int, ...]) -> None:
    steps = list(program().programs[rank].instructions)
    attrs = steps[0].attrs.updated(layers=layers)
    changed = with_list(program(), rank, [replace(steps[0], attrs=attrs), *steps[1:]])
    assert bool(find_problems(changed)) == (layers != (2, 0, 1))


@given(layer_lists)
def test_what_all_ranks_gather_is_every_layer_that_trains_once(layers: tuple[int, ...]) -> None:
    module = program()
    for rank, own in enumerate(module.programs):
        first, *rest = own.instructions
        module = with_list(module, rank, [replace(first, attrs=first.attrs.updated(layers=layers)), *rest])
    assert bool(find_problems(module)) == (sorted(layers) != [0, 1, 2])


@given(st.sets(st.integers(0, WORLD - 1), min_size=1))
def test_a_dropped_gather_is_refused(ranks: set[int]) -> None:
    module = program()
    for rank in ranks:
        module = with_list(module, rank, list(module.programs[rank].instructions[1:]))
    assert find_problems(module)
