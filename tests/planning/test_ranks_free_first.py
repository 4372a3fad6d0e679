"""When ranks count as free: slack, moments without inputs, and placements that are as long as scheduled."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Cascade, Phase
from arachnec.ir.values import Quantity
from arachnec.planning import family_placement, placement
from arachnec.planning.handoff_memory import Late
from arachnec.planning.rank_choice import TOLERANCE, pick_ranks
from arachnec.planning.staged_placement import is_pipeline
from arachnec.solver.bound import NEGLIGIBLE
from tests.planning.costed_modules import module
from tests.planning.test_placement_choices import ENOUGH, scheduled


@pytest.mark.parametrize(("late", "rank"), [(0.0, 1), (0.99, 1), (1.0, 1), (1.01, 0)])
@pytest.mark.parametrize("took", [1e-6, 0.5, 30.0, 4000.0])
def test_a_rank_that_holds_the_input_may_be_free_later_by_a_small_part_of_the_time(
    took: float, late: float, rank: int
) -> None:
    """Alone, and as the one group of its size."""
    costed = module("1x2:h100-80g", [900], encoders=1)
    cost = CostModel(costed)
    encoder, cascade = costed.cascades
    source = encoder.with_attrs(start=Quantity(0.0, "ms"), end=Quantity(0.0, "ms"), ranks=(1,))
    one = cascade.with_attrs(degree=1, start=Quantity(2.0 * took, "ms"), end=Quantity(3.0 * took, "ms"))
    free = [0.0, late * (TOLERANCE + NEGLIGIBLE * (3.0 * took - 2.0 * took))]
    assert placement.place_among(one, (0, 1), [source], free, cost, pick_ranks).ranks == (rank,)
    groups = family_placement._groups(cost.cluster, 1, None)
    assert groups.first_free(one, [source], np.array(free)) == (rank,)


def test_without_inputs_a_cascade_can_start_at_once() -> None:
    """A rank that is free in half a millisecond is not as good as one that is free, though it is the first of them."""
    costed = module("1x2:h100-80g", [900], encoders=0)
    cost = CostModel(costed)
    (cascade,) = scheduled(costed, (1,), (0.0,))
    assert placement.place_among(cascade, (0, 1), [], [0.9, 0.0], cost, pick_ranks).ranks == (1,)
    groups = family_placement._groups(cost.cluster, 1, None)
    assert groups.first_free(cascade, [], np.array([0.9, 0.0])) == (1,)


def test_what_is_late_begins_behind_the_last_of_what_it_is_behind_and_else_at_once() -> None:
    costed = module("1x4:h100-80g", [900, 4000], encoders=1)
    cost = CostModel(costed)
    encoders = [cascade for cascade in scheduled(costed, (1,), (0.0,)) if cascade.phase is Phase.ENCODE]
    trained = [cascade for cascade in scheduled(costed, (1,), (0.0,)) if cascade.phase is Phase.TRAIN]
    first, second = (replace(cascade, inputs=()) for cascade in trained)
    turns = [
        Late(first, (0,), ()),
        Late(second, (1,), ()),
        Late(encoders[0], (2,), (0, 1)),
        Late(encoders[1], (3,), ()),
    ]
    placed = placement._encoded_late(turns, cost)
    assert [cascade.ranks for cascade in placed] == [(0,), (1,), (2,), (3,)]
    assert [placed[at].start for at in (0, 1, 3)] == [0.0, 0.0, 0.0]
    assert placed[2].start == max(placed[0].end, placed[1].end) > min(placed[0].end, placed[1].end)


@pytest.mark.parametrize(
    ("ends", "tried", "taken"),
    [
        ([150.0, 140.0, 145.0], 3, 1),
        ([ENOUGH, 99.0], 1, 0),
        ([math.nextafter(ENOUGH, 200.0), 99.0, 98.0], 2, 1),
        ([100.0, 99.0], 1, 0),
        ([120.0, 120.0], 2, 0),
    ],
)
def test_quick_placements_are_tried_until_one_is_as_long_as_scheduled_and_the_shortest_is_taken(
    ends: list[float], tried: int, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    costed = module("1x4:h100-80g", [900, 900], encoders=0)
    times = {"start": Quantity(0.0, "ms"), "end": Quantity(100.0, "ms")}
    cascades = [cascade.with_attrs(degree=1, **times) for cascade in costed.cascades]
    placed = [[one.with_attrs(end=Quantity(end, "ms")) for one in cascades] for end in ends]
    given: list[int] = []

    def quick(*_: object) -> Iterator[list[Cascade]]:
        for number, option in enumerate(placed):
            given.append(number)
            yield option

    monkeypatch.setattr(placement, "quick_placements", quick)
    assert placement.best_placements(cascades, CostModel(costed)) is placed[taken]
    assert given == list(range(tried))


def test_rather_than_crossing_an_uplink_a_cascade_waits_for_a_rack_that_is_just_as_wide() -> None:
    costed = module("3x4:l20", [9000, 9000, 500, 4000], encoders=0)
    assert costed.cluster is not None
    attrs = costed.cluster.attrs.updated(rack=1, uplink=Quantity(0.01, "GB/s"))
    costed = replace(costed, cluster=replace(costed.cluster, attrs=attrs))
    cascades = scheduled(costed, (3, 3, 2, 4), (0.0,))
    *others, wide = placement.placements(
        [one.with_attrs(start=Quantity(0.0, "ms")) for one in cascades], CostModel(costed)
    )
    assert [one.ranks for one in others] == [(0, 1, 2), (4, 5, 6), (8, 9)]
    assert wide.ranks == (8, 9, 10, 11) and wide.start == others[-1].end


def test_where_groups_are_outside_the_family_a_wait_is_worth_their_price(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a percent of the iteration; first whatever the wait."""
    costed = module("1x4:h100-80g", [900, 900], encoders=0)
    cascades = [
        cascade.with_attrs(degree=1, start=Quantity(0.0, "ms"), end=Quantity(300.0, "ms"), ranks=(0,))
        for cascade in costed.cascades
    ]
    worths: list[float] = []

    def waiting(cascades: list[Cascade], cost: CostModel, worth: float) -> list[Cascade]:
        worths.append(worth)
        return cascades

    monkeypatch.setattr(family_placement, "family_placements", waiting)
    monkeypatch.setattr(family_placement, "outside", lambda *_: cascades)
    list(family_placement._candidates(cascades, CostModel(costed), one=False))
    assert worths == [math.inf, pytest.approx(1.5)]


def test_a_pipeline_may_have_encoders_beside_it() -> None:
    costed = module("1x4:h100-80g", [900], encoders=1)
    encoder, cascade = costed.cascades
    assert not is_pipeline(costed)
    assert is_pipeline(replace(costed, cascades=(encoder, replace(cascade, phase=Phase.FORWARD))))
    assert not is_pipeline(replace(costed, cascades=(replace(encoder, phase=Phase.FORWARD),))), "it is not trained"
