"""A rank comes to its events in the order in which its host posts them, by a plain walk of its list."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arachnec.analysis.execution_model import ExecutionModel
from arachnec.analysis.receive_prefetch import Prefetched, in_place, prefetched_receives
from arachnec.analysis.uses import Values, overlapped_reduces
from arachnec.ir.nodes import Instruction, Module
from arachnec.lowering.programs import lower
from arachnec.verification.deadlock import _connections, _handoff_events, _ordered, _posted_places
from arachnec.verification.handoffs import Handoff, match_handoffs
from tests.lowering.test_reduce_overlap import split
from tests.passes.plans import placed_modules

Event: TypeAlias = tuple[str, int, int, int]  # a connection of two ranks, or the n-th handoff from one to another
DEVICE = ExecutionModel("device", "prefetched", "first-use")


def drawn_places(values: Values, rng: random.Random) -> dict[int, Prefetched]:
    """Every receive somewhere ahead of its place, those of a rank in their order."""
    posted = {}
    for program in values.module.programs:
        rows: list[list[Instruction]] = [[] for _ in program.instructions]
        earliest = 0
        for index, step in enumerate(program.instructions):
            if step.op == "receive":
                earliest = rng.randint(earliest, index)
                rows[earliest].append(step)
        posted[program.rank] = tuple(map(tuple, rows))
    return posted


def walked(values: Values, posted: dict[int, Prefetched]) -> dict[int, list[Event]]:
    """What each host does, one thing after another: it connects to a rank right before it first needs to."""
    order = {}
    for program in values.module.programs:
        known: set[int] = set()
        number: dict[tuple[str, int], int] = defaultdict(int)
        events: list[Event] = []
        for step, receives in zip(program.instructions, posted[program.rank], strict=True):
            for one in (*receives, *((step,) if step.op == "send" else ())):
                (peer,) = one.peers
                if peer not in known:
                    known.add(peer)
                    events.append(("connect", min(peer, program.rank), max(peer, program.rank), 0))
                source, target = (program.rank, peer) if one.op == "send" else (peer, program.rank)
                events.append(("hand over", source, target, number[one.op, peer]))
                number[one.op, peer] += 1
        order[program.rank] = events
    return order


def sorted_events(handoffs: list[Handoff], values: Values, posted: dict[int, Prefetched]) -> dict[int, list[Event]]:
    """The same by the places that the proof gives them."""
    places = _posted_places(values, posted)
    at: dict[int, list[tuple[tuple[int, int, int], Event]]] = defaultdict(list)
    number: dict[tuple[int, int], int] = defaultdict(int)
    for one, event in zip(handoffs, _handoff_events(handoffs, places), strict=True):
        name = ("hand over", one.source, one.target, number[one.source, one.target])
        number[one.source, one.target] += 1
        for rank, place in event.places:
            at[rank].append((place, name))
    for event in _connections(handoffs, places):
        low, high = sorted(rank for rank, _ in event.places)
        for rank, place in event.places:
            at[rank].append((place, ("connect", low, high, 0)))
    for rows in at.values():
        assert len({place for place, _ in rows}) == len(rows)  # no order is left to chance
    return {program.rank: [name for _, name in sorted(at[program.rank])] for program in values.module.programs}


@given(placed_modules(), st.randoms(use_true_random=False))
def test_events_stand_where_the_host_comes_to_them(module: Module, rng: random.Random) -> None:
    values = Values(lower(module))
    handoffs = list(match_handoffs(values, []))
    for posted in (
        drawn_places(values, rng),
        {program.rank: in_place(program) for program in values.module.programs},
        prefetched_receives(values, DEVICE, 80.0),
    ):
        assert sorted_events(handoffs, values, posted) == walked(values, posted)


@given(placed_modules())
def test_what_is_posted_in_place_stands_at_its_instruction_and_leaves_room_for_a_connection_before_it(
    module: Module,
) -> None:
    """Where a collective of that instruction would stand, or two before."""
    values = Values(lower(module))
    handoffs = list(match_handoffs(values, []))
    for one, event in zip(handoffs, _handoff_events(handoffs, {}), strict=True):
        places = {rank: (number, 0, number) for rank, number in ((one.source, one.send), (one.target, one.receive))}
        assert dict(event.places) == places
    posted = _posted_places(values, {program.rank: in_place(program) for program in values.module.programs})
    assert posted == {(one.target, one.receive): (one.receive, -2, one.receive) for one in handoffs}


@pytest.mark.parametrize("case", ["zb-h1", "planned", "cells"])
def test_a_backward_stands_before_and_behind_every_reduce_that_starts_inside_it(case: str) -> None:
    """In the order of their places, too; the first part where the instruction itself would stand."""
    for program in split(case, [9, 4, 6, 3, 5, 2]).programs:
        places = [place for place, _, _ in _ordered(program)]
        assert places == sorted(places) and len({*places}) == len(places)
        inside = overlapped_reduces(program)
        right: list[tuple[Instruction, Instruction | None]] = []
        for index, step in enumerate(program.instructions):
            reduces = [program.instructions[number] for number in inside.get(index, ())]
            for reduce in reduces:
                right += [(step, reduce), (reduce, None)]
            if not any(index in numbers for numbers in inside.values()):
                right.append((step, None))
                assert (index, 2 * len(reduces), index) in places
        assert inside
        assert [(step, reduce) for _, step, reduce in _ordered(program)] == right
