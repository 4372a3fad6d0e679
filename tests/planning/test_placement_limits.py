"""When a placement is good enough, ranks are early and a wait is worth it: each limit from both sides."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.analysis.group_family import aligned
from arachnec.cluster.topology import rack_of
from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Cascade, Cluster, Module
from arachnec.ir.values import Quantity
from arachnec.planning import family_placement, placement
from arachnec.planning.family_placement import PRICE, _anywhere, _groups, family_placements, markup
from arachnec.planning.handoff_memory import Late
from arachnec.planning.placement import _encoded_late, best_placements, end_of, in_cells, place_among, placements, pools
from arachnec.planning.rank_choice import TOLERANCE, pick_ranks
from arachnec.solver.bound import NEGLIGIBLE
from tests.planning.costed_modules import module
from tests.planning.test_placement_choices import ENOUGH, arrival


def timed(cascade: Cascade, start: float, end: float, degree: int = 1, ranks: tuple[int, ...] = ()) -> Cascade:
    times = {"start": Quantity(start, "ms"), "end": Quantity(end, "ms")}
    return cascade.with_attrs(degree=degree, ranks=ranks or None, **times)


def in_racks(costed: Module, nodes: int, uplink: float = 1.0) -> Module:
    """Racks of so many nodes."""
    assert costed.cluster is not None
    attrs = costed.cluster.attrs.updated(rack=nodes, uplink=Quantity(uplink, "GB/s"))
    return replace(costed, cluster=replace(costed.cluster, attrs=attrs))


# -- good enough -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ends", "tried", "taken"),
    [
        ((150.0, 100.1, 99.0), 2, 1),  # as long as scheduled, but for a part in a thousand
        ((150.0, ENOUGH, 99.0), 2, 1),
        ((150.0, math.nextafter(ENOUGH, 200.0), 100.2), 3, 1),
        ((99.0, 98.0), 1, 0),
        ((150.0, 120.0, 130.0), 3, 1),  # the shortest
        ((120.0, 120.0), 2, 0),
        ((150.0,), 1, 0),
    ],
)
def test_quick_placements_are_tried_until_one_is_as_long_as_scheduled_and_the_shortest_is_taken(
    ends: tuple[float, ...], tried: int, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    costed = module("1x4:h100-80g", [900, 900])
    cascades = [timed(costed.cascades[0], 0.0, 60.0), timed(costed.cascades[1], 0.0, 100.0)]
    placed = [[cascades[0], timed(cascades[1], 0.0, end)] for end in ends]
    given: list[int] = []

    def quick(*_: object) -> Iterator[list[Cascade]]:
        for number, cascades in enumerate(placed):
            given.append(number)
            yield cascades

    monkeypatch.setattr(placement, "quick_placements", quick)
    assert best_placements(cascades, CostModel(costed)) is placed[taken]
    assert given == list(range(tried))


@pytest.mark.parametrize("cells", [(None, None), (1, None), (None, 2), (2, None), (3, 1), (2, 4)])
def test_a_module_is_in_cells_where_cascades_of_some_stage_take_several_ranks_together(
    cells: tuple[int | None, int | None],
) -> None:
    costed = module("1x4:h100-80g", [900], encoders=1)
    stages = [
        replace(stage, attrs=stage.attrs.updated(cell=cell)) for stage, cell in zip(costed.stages, cells, strict=True)
    ]
    whole = [cell for cell in cells if cell is not None and cell >= 2]
    assert in_cells(CostModel(replace(costed, stages=tuple(stages)))) == (len(whole) > 0)


def test_free_ranks_are_tried_then_aligned_groups_for_however_long_or_for_the_price_of_one_then_those_that_idle_least(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costed = module("1x4:h100-80g", [900])
    cascades = [timed(costed.cascades[0], 0.0, 80.0)]
    named = {name: [timed(cascades[0], 0.0, end)] for name, end in (("free", 1.0), ("end", 2.0), ("start", 3.0))}
    waits: list[float] = []

    def waiting(_: object, __: object, worth: float) -> list[Cascade]:
        waits.append(worth)
        return [timed(cascades[0], 0.0, 9.0 + len(waits))]

    monkeypatch.setattr(family_placement, "quick_placements", lambda *_: iter(named.values()))
    monkeypatch.setattr(family_placement, "family_placements", waiting)
    for strays, alone, ends in (
        ([cascades[0]], False, [1.0, 10.0, 11.0, 2.0, 3.0]),
        ([], False, [1.0, 2.0, 3.0]),
        ([cascades[0]], True, [10.0, 1.0, 11.0, 2.0, 3.0]),
        ([], True, [10.0, 1.0, 2.0, 3.0]),
    ):
        waits.clear()
        monkeypatch.setattr(family_placement, "outside", lambda *_, strays=strays: strays)
        tried = family_placement._candidates(cascades, CostModel(costed), one=alone)
        assert [end_of(placed) for placed in tried] == ends
        assert waits == [math.inf, pytest.approx(80.0 * PRICE)][: sum(end >= 10.0 for end in ends)]


def test_every_group_outside_the_family_has_a_price_once() -> None:
    """A group is ranks and how they share a clip: two cascades on the same have one, on another grid they have two."""
    costed = module("1x8:h100-80g", [900] * 5)
    cost = CostModel(costed)
    first, again, other, within, alone = costed.cascades
    placed = [
        timed(first, 0.0, 9.0, 2, (0, 3)).with_attrs(ulysses=2, ring=1),
        timed(again, 9.0, 19.0, 2, (0, 3)).with_attrs(ulysses=2, ring=1),
        timed(within, 0.0, 9.0, 2, (4, 5)).with_attrs(ulysses=2, ring=1),
        timed(alone, 0.0, 9.0, 1, (6,)).with_attrs(ulysses=1, ring=1),
    ]
    assert markup(placed[2:], cost) == 1.0
    assert markup(placed, cost) == pytest.approx(1 + PRICE)
    for ranks, ulysses in (((0, 3), 1), ((1, 6), 2)):
        more = timed(other, 20.0, 29.0, 2, ranks).with_attrs(ulysses=ulysses, ring=2 // ulysses)
        assert markup([*placed, more], cost) == pytest.approx(1 + 2 * PRICE)


# -- early ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("late", "early"), [(0.0, True), (0.99, True), (1.0, True), (1.01, False)])
@pytest.mark.parametrize("took", [1e-6, 0.5, 30.0, 4000.0])
@pytest.mark.parametrize("ready", [None, 0.0, 7.0])
def test_ranks_are_early_until_a_small_part_of_the_time_after_the_cascade_could_start(
    took: float, late: float, early: bool, ready: float | None
) -> None:
    """Which is when as many as it takes are free, and its last input is there."""
    costed = module("1x8:h100-80g", [900], encoders=2)
    *encoders, cascade = costed.cascades
    inputs = [timed(encoder, 0.0, end, 1, (3,)) for encoder, end in zip(encoders, (0.0, ready or 0.0), strict=True)]
    wide = timed(cascade, 2.0 * took, 3.0 * took, 2)
    first = ready if ready is not None and ready > 0.25 else 0.25
    at = first + (TOLERANCE + NEGLIGIBLE * (3.0 * took - 2.0 * took)) * late
    if late == 1.0:
        at = first + (TOLERANCE + NEGLIGIBLE * (3.0 * took - 2.0 * took))
    offered: list[tuple[Sequence[int], int, set[int]]] = []

    def pick(_: Cluster, free: Sequence[int], degree: int, near: set[int]) -> tuple[int, ...]:
        offered.append((tuple(free), degree, near))
        return tuple(free)[:degree]

    known = [] if ready is None else inputs
    free = (9e9, 0.0, 0.25, at, 9e9, 0.1, 0.1, 0.1)
    placed = place_among(wide, range(1, 5), known, free, CostModel(costed), pick)
    assert offered == [((1, 2, 3) if early else (1, 2), 2, set() if ready is None else {3})]
    assert placed.ranks == (1, 2)


@pytest.mark.parametrize("late", [0.0, 0.99, 1.0, 1.01])
@pytest.mark.parametrize("took", [1e-6, 0.5, 30.0, 4000.0])
def test_an_aligned_group_near_the_input_may_be_free_later_by_a_small_part_of_the_time(
    took: float, late: float
) -> None:
    costed = module("1x4:h100-80g", [900], encoders=1)
    encoder, cascade = costed.cascades
    wide = timed(cascade, 2.0 * took, 3.0 * took, 2)
    free = np.array([0.0, 0.0, 0.0, late * (TOLERANCE + NEGLIGIBLE * (3.0 * took - 2.0 * took))])
    groups = _groups(CostModel(costed).cluster, 2, None)
    taken = groups.first_free(wide, [timed(encoder, 0.0, 0.0, 1, (2,))], free)
    assert taken == ((0, 1) if late > 1.0 else (2, 3))


def test_a_group_is_chosen_for_the_input_that_comes_last_and_without_inputs_for_now() -> None:
    costed = module("1x4:h100-80g", [900], encoders=2)
    *encoders, cascade = costed.cascades
    wide = timed(cascade, 0.0, 1.0, 2)
    sources = [timed(encoder, 0.0, end, 1, (2,)) for encoder, end in zip(encoders, (0.0, 5.0), strict=True)]
    groups, free = _groups(CostModel(costed).cluster, 2, None), np.array([0.0, 0.0, 4.0, 0.0])
    assert groups.first_free(wide, sources, free) == groups.first_free(wide, sources[::-1], free) == (2, 3)
    assert groups.first_free(wide, sources[:1], free) == (0, 1)
    assert groups.first_free(wide, [], free / 8) == (0, 1), "the one that idles least is not free yet"
    assert groups.first_free(wide, [sources[0].with_attrs(ranks=(1, 2, 3))], free / 1e9) == (2, 3), "more of the input"


@pytest.mark.parametrize(("nodes", "gpus", "rack", "size"), [(6, 1, 3, 2), (6, 2, 3, 4), (6, 2, 3, 2), (4, 2, 2, 8)])
def test_of_groups_that_start_together_one_in_a_rack_is_taken(nodes: int, gpus: int, rack: int, size: int) -> None:
    """Even where the other holds all inputs."""
    costed = in_racks(module(f"{nodes}x{gpus}:l20", [900], encoders=1), rack)
    encoder, cascade = costed.cascades
    assert costed.cluster is not None
    groups, cluster = _groups(costed.cluster, size, None), costed.cluster
    racks = [{rack_of(cluster, rank) for rank in group} for group in aligned(cluster, size)]
    assert [bool(crosses) for crosses in groups.crossing] == [len(held) == 2 for held in racks]
    assert [tuple(ranks) for ranks in groups.ranks.tolist()] == list(aligned(cluster, size))
    near = [group for group, held in zip(aligned(cluster, size), racks, strict=True) if len(held) == 2]
    for group in near or [(0,)]:
        source = timed(encoder, 0.0, 0.0, 1, group)
        taken = groups.first_free(timed(cascade, 0.0, 1.0, size), [source], np.zeros(cluster.world))
        assert (len({rack_of(cluster, rank) for rank in taken}) == 2) == all(len(held) == 2 for held in racks)


@pytest.mark.parametrize("pool", [(0, 1, 2), (1, 2, 3, 4, 5), (4, 5, 6, 7), (1, 3, 5, 7)])
def test_groups_of_a_pool_are_those_whose_ranks_are_all_in_it(pool: tuple[int, ...]) -> None:
    cluster = CostModel(module("2x4:h100-80g", [900])).cluster
    for size in (1, 2, 4):
        held = [group for group in aligned(cluster, size) if all(rank in pool for rank in group)]
        assert [tuple(ranks) for ranks in _groups(cluster, size, pool).ranks.tolist()] == held


# -- worth a wait ------------------------------------------------------------------------------------------------------


def crowded() -> tuple[CostModel, list[Cascade]]:
    """Four narrow cascades, one of them short on each pair of ranks; then one that takes two ranks."""
    costed = module("1x4:h100-80g", [6000, 900, 6000, 900, 900])
    cost = CostModel(costed)
    degrees = (1, 1, 1, 1, 2)
    rows = zip(costed.cascades, degrees, strict=True)
    return cost, [
        timed(cascade, at, at + cost.time(cascade, degree), degree) for at, (cascade, degree) in enumerate(rows)
    ]


@pytest.mark.parametrize("wait", [0.5, 1.0, 2.0, 1.0 + 1e-12, 1.0 - 1e-12])
@pytest.mark.parametrize("gain", [0.5, 1.0, 2.0, 1.0 + 1e-9, 1.0 - 1e-9])
def test_other_ranks_are_taken_where_the_wait_for_a_group_is_worth_so_much_and_so_is_the_gain(
    wait: float, gain: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait is from when any ranks are free together, the gain that of the end."""
    cost, cascades = crowded()
    waiting = family_placements(cascades, cost, math.inf)
    narrow, wide = waiting[:4], waiting[4]
    assert wide.ranks == (0, 1)
    waits = wide.start - sorted(cascade.end for cascade in narrow)[1]
    assert waits > 1.0
    worth = waits / wait if wait != 1.0 else waits
    looked: list[str] = []

    def other(cascade: Cascade, *_: object) -> Cascade:
        looked.append(cascade.name)
        return timed(cascade, 0.0, wide.end - worth * gain, 2, (1, 3))

    monkeypatch.setattr(family_placement, "_anywhere", other)
    placed = family_placements(cascades, cost, worth)[4]
    assert looked == ([wide.name] if wait >= 1.0 else [])
    if gain != 1.0:  # a sum and a difference of floats: equal but for rounding
        assert placed.ranks == ((1, 3) if wait >= 1.0 and gain > 1.0 else wide.ranks)


def test_a_gain_of_just_so_much_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cost, cascades = crowded()
    wide = family_placements(cascades, cost, math.inf)[4]
    for end, ranks in ((wide.end - 1.0, (1, 3)), (math.nextafter(wide.end - 1.0, math.inf), (0, 1))):
        assert (end + 1.0 <= wide.end) == (ranks == (1, 3))
        monkeypatch.setattr(family_placement, "_anywhere", lambda c, *_, end=end: timed(c, 0.0, end, 2, (1, 3)))
        assert family_placements(cascades, cost, 1.0)[4].ranks == ranks


def test_where_devices_differ_a_cascade_goes_to_the_kind_on_which_it_ends_first() -> None:
    costed = module("1x4:h100-80g+1x4:a100-80g", [4000])
    cost, cascade = CostModel(costed), timed(costed.cascades[0], 0.0, 1.0, 3)
    assert len(pools(cascade, cost)) == 3
    for free in ([0.0] * 8, [99.0] * 4 + [0.0] * 4, [0.0] * 4 + [99.0] * 4, [5.0] * 4 + [0.0] * 4):
        ends = {
            pool: place_among(cascade, pool, [], free, cost, pick_ranks).end
            for pool in map(tuple, pools(cascade, cost))
        }
        assert len({*ends.values()}) > 1
        assert _anywhere(cascade, [], free, cost).end == sorted(ends.values())[0]
    plain = CostModel(module("1x8:h100-80g", [4000]))
    assert _anywhere(cascade, [], [9.0, 0.0, 9.0, 9.0, 0.0, 9.0, 9.0, 0.0], plain).ranks == (1, 4, 7)


def test_where_devices_differ_an_aligned_group_is_of_the_kind_on_which_a_cascade_ends_first() -> None:
    costed = module("1x4:h100-80g+1x4:a100-80g", [4000, 4000, 4000])
    cost, (first, second, third) = CostModel(costed), costed.cascades
    cascades = [timed(first, 0.0, 1.0, 4), timed(second, 1.0, 2.0, 2), timed(third, 2.0, 3.0, 4)]
    placed = family_placements(cascades, cost, math.inf)
    free = [0.0] * 8
    for cascade, wanted in zip(placed, cascades, strict=True):
        ends = {
            group: max(free[rank] for rank in group) + cost.time(wanted, wanted.width, ranks=group)
            for group in aligned(cost.cluster, wanted.width)
        }
        assert cascade.end == pytest.approx(sorted(ends.values())[0], abs=2e-6)
        assert ends[cascade.ranks] == pytest.approx(cascade.end, abs=2e-6)
        for rank in cascade.ranks:
            free[rank] = cascade.end
    assert len({cascade.ranks[0] // 4 for cascade in placed}) == 2


# -- racks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("uplink", "ranks", "start"), [(0.01, (0, 1), 40.0), (6.0, (0, 2), 10.0)])
def test_a_cascade_waits_for_a_rack_that_holds_just_as_many_where_it_ends_earlier_so(
    uplink: float, ranks: tuple[int, int], start: float
) -> None:
    """Of each of two racks one rank is free at once, the other one of the first rack before that of the second."""
    costed = in_racks(module("4x1:l20", [4000] * 5), 2, uplink)
    *narrow, wide = costed.cascades
    cost = CostModel(costed)
    assert cost.time(wide, 2, ranks=(0, 1)) < cost.time(wide, 2, ranks=(0, 2))
    ends = zip(narrow, (10.0, 40.0, 10.0, 90.0), strict=True)
    cascades = [*(timed(cascade, 0.0, end) for cascade, end in ends), timed(wide, 10.0, 11.0, 2)]
    *before, placed = placements(cascades, cost)
    assert [cascade.ranks for cascade in before] == [(0,), (1,), (2,), (3,)]
    assert (placed.ranks, placed.start) == (ranks, start)
    assert placed.end == pytest.approx(start + cost.time(wide, 2, ranks=ranks), abs=2e-6)


@pytest.mark.parametrize("width", [2, 3])
def test_what_crosses_no_uplink_or_fits_no_rack_has_the_ranks_that_the_schedule_left_free(width: int) -> None:
    """Two cascades that start earlier than scheduled leave their rack early; three ranks are only in two racks."""
    costed = in_racks(module("4x1:l20", [4000] * 5), 2)
    *narrow, wide = costed.cascades
    cost = CostModel(costed)
    times = ((0.0, 900.0), (0.0, 900.0), (1000.0, 1010.0), (1000.0, 1010.0))
    cascades = [timed(cascade, *at) for cascade, at in zip(narrow, times, strict=True)]
    at = 1005.0 if width == 2 else 1010.0
    *before, placed = placements([*cascades, timed(wide, at, at + 1.0, width)], cost)
    assert [(cascade.ranks, cascade.end) for cascade in before] == [((0,), 900), ((1,), 900), ((2,), 10), ((3,), 10)]
    assert placed.start == 900.0
    assert placed.ranks == (0, 1) if width == 2 else len(placed.ranks) == 3


# -- encoders that are late --------------------------------------------------------------------------------------------


@given(st.integers(0, 10**9).map(Random))
@settings(max_examples=25, deadline=None)
def test_what_is_late_starts_when_its_ranks_are_free_and_all_that_it_is_behind_have_come(rng: Random) -> None:
    """And its inputs are there; without ranks to be behind of, at once."""
    costed = module("1x4:h100-80g", [900, 4000, 900], encoders=1)
    cost, turns = CostModel(costed), []
    for cascade in costed.cascades:
        ranks, behind = (tuple(sorted(rng.sample(range(4), rng.randint(least, 2)))) for least in (1, 0))
        turns.append(Late(timed(cascade, 0.0, rng.uniform(1.0, 9.0), len(ranks)), ranks, behind))
    free, ends = [0.0] * 4, {}
    for turn, placed in zip(turns, _encoded_late(turns, cost), strict=True):
        waits = [0.0, *(free[rank] for rank in (*turn.ranks, *turn.behind))]
        inputs = [ends[name] for name in turn.cascade.inputs if name in ends]
        arrived = [one.end + arrival(one, placed, cost) for one in inputs]
        assert (placed.name, placed.ranks) == (turn.cascade.name, turn.ranks)
        assert placed.start == pytest.approx(sorted([*waits, *arrived])[-1], abs=2e-6)
        assert placed.end - placed.start == pytest.approx(turn.cascade.end, abs=2e-6)
        ends[placed.name] = placed
        for rank in turn.ranks:
            free[rank] = placed.end
