"""``check`` accepts no program that reads a layer before its update was gathered, and none that stands still there."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.analysis.communicators import HOST_HANDOFFS
from arachnec.analysis.receive_prefetch import prefetched_receives
from arachnec.analysis.uses import Values, rank_list
from arachnec.ir.nodes import Cascade, Instruction, Level, Module, Phase, Program, Span, Stage, integers
from arachnec.ir.values import Attributes
from arachnec.passes.check import find_problems
from arachnec.verification.shards import check_updated_parameters
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


STEPS = ("gather", "gather", "forward", "backward", "weight", "step", "reduce")


def drawn_steps(rng: random.Random, rank: int, alone: bool) -> tuple[Instruction, ...]:
    """Of a stage and of another one, in any order; ``alone``: whose gradients are rank 1's."""
    steps = []
    for line in range(rng.randint(0, 9)):
        op, stage = rng.choice(STEPS), rng.choice(("dealt", "dealt", "dealt", "whole"))
        own = tuple(other for other in range(WORLD) if other % 2 == rank % 2)
        peers = rng.choice((tuple(range(WORLD)), own, own, (rank,)))
        peers = (1,) if alone and op == "reduce" else peers
        layers = tuple(rng.choices(range(4), k=rng.randint(1, 3))) if rng.random() < 0.5 else (3, 0, 2)
        tied = (0, 1) if op == "reduce" and rng.random() < 0.2 else None
        attrs = Attributes.of(layers=layers if op == "gather" else None, tied=tied)
        target = stage if op in ("gather", "step", "reduce") else f"c_{stage}"
        steps.append(Instruction(op, target, peers, attrs, Span("drawn", 100 * rank + line + 1, 1, 9, 9)))
    return tuple(steps)


@given(st.sampled_from([None, 1, 2]), st.booleans(), st.integers(0, 10**9).map(random.Random))
@settings(max_examples=100)
def test_what_a_list_gathers_is_what_the_ranks_with_its_parts_have_updated_once_and_before_it_is_read(
    cell: int | None, rest: bool, rng: random.Random
) -> None:
    """Layer 1 has no parameters, 3 is what lies outside of 0 to 2. The next update reads, too."""
    layers = (("blocks.0", 10), ("blocks.1", 0), ("blocks.2", 10))
    attrs = Attributes.of(params=25 if rest else 20, layers=layers, cell=cell)
    stages = (Stage("dealt", True, attrs.updated(sharded=WORLD)), Stage("whole", True, attrs.updated(cell=None)))
    cascades = tuple(Cascade(f"c_{s.name}", Phase.TRAIN, s.name, (0,), 1, 4, 0) for s in stages)
    alone = rng.random() < 0.2
    lists = tuple(Program(rank, drawn_steps(rng, rank, alone)) for rank in range(WORLD))
    module = Module("drawn", Level.LOWERED, None, (), stages, cascades=cascades, programs=lists)
    reduces = [step for own in lists for step in own.instructions if (step.op, step.target) == ("reduce", "dealt")]
    place = sorted({rank for step in reduces if "tied" not in step.attrs for rank in step.peers})
    training = [3, 0, 2] if rest else [0, 2]
    right: list[tuple[object, str]] = []
    for own in lists:
        ranks = tuple(rank for rank in place if rank % (cell or 1) == own.rank % (cell or 1))
        for step in own.instructions:
            if step.op != "gather":
                continue
            unknown = [layer for layer in integers(step.attrs["layers"]) if layer not in training]
            if step.target == "whole" or len(place) < 2:
                right.append((step.span, f"every rank has updated all of @{step.target} itself"))
            elif step.peers != ranks:
                right.append((step.span, f"ranks {rank_list(ranks)} have updated its parts"))
            elif unknown:
                right.append((step.span, f"layer {unknown[0]} is not one of those that train"))
        gathered: list[int] = []
        for step in own.instructions if own.rank in place and len(place) > 1 else ():
            if (step.op, step.target) == ("gather", "dealt"):
                for layer in integers(step.attrs["layers"]):
                    right += [(step.span, f"layer {layer} of @dealt is gathered a second time")] * (
                        gathered.count(layer) == 1
                    )
                    gathered.append(layer)
            missing = [layer for layer in training if layer not in gathered]
            if missing and (step.target == "c_dealt" or (step.op, step.target) == ("step", "dealt")):
                right.append((step.span, f"layer {missing[0]} of @dealt is not whole yet"))
                break
    told = [
        (one.span, one.message.split(", and ")[1])
        for one in check_updated_parameters(Values(module))
        if one.kind in ("wrong gather", "not updated")
    ]
    assert Counter(told) == Counter(right)
