"""Which ranks placements take, held against trying all of them: in the order that each docstring gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.analysis.group_family import aligned
from arachnec.cluster.topology import handoff_time, rack_of
from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Cascade, Module, Phase, Reduce
from arachnec.ir.values import Attributes, Quantity
from arachnec.planning import family_placement, placement
from arachnec.planning.family_placement import _free_together, family_placements, placed_on_few_groups
from arachnec.planning.handoff_memory import Overflow, ValuesFitNowhere
from arachnec.planning.placement import _free_cells, cell_placements, end_of, in_order, on_ranks
from arachnec.planning.rank_choice import TOLERANCE
from arachnec.planning.staged_placement import PlaceTooSmall, is_pipeline, stage_places, staged_placements
from arachnec.solver.bound import NEGLIGIBLE
from tests.planning.costed_modules import module

GIB = 2**30
Choose = Callable[[Cascade, list[Cascade], list[float], float], list[tuple[int, ...]]]
CASES = st.tuples(
    st.lists(st.sampled_from([500, 900, 4000]), min_size=2, max_size=7),
    st.lists(st.sampled_from([1, 2, 4, 8]), min_size=7, max_size=7),
    st.lists(st.sampled_from([0.0, 0.0, 5.0, 40.0]), min_size=7, max_size=7),
)


def scheduled(costed: Module, degrees: Sequence[int], starts: Sequence[float]) -> list[Cascade]:
    """Cascades of these degrees, which start about then; an encoder's before its transformer's."""
    cost, cascades, at = CostModel(costed), [], 0.0
    for number, cascade in enumerate(costed.cascades):
        train = cascade.phase is Phase.TRAIN
        degree = min(degrees[number % len(degrees)], costed.cluster.world) if train else 1  # type: ignore[union-attr]
        at += starts[number % len(starts)]
        took = cost.time(cascade, degree)
        times = {"start": Quantity(at, "ms"), "end": Quantity(at + took, "ms")}
        cascades.append(cascade.with_attrs(degree=degree, **times))
        at += took if not train else 0.0
    return cascades


def demand_choices(cascades: Sequence[Cascade], placed: Sequence[Cascade], cost: CostModel, choose: Choose) -> None:
    """Every cascade lies on one of the groups that ``choose`` finds, and starts as soon as these and its inputs are
    there."""
    free = [0.0] * cost.cluster.world
    done: dict[str, Cascade] = {}
    for wanted, cascade in zip(in_order(cascades), placed, strict=True):
        assert wanted.name == cascade.name
        inputs = [done[name] for name in cascade.inputs if name in done]
        slack = TOLERANCE + NEGLIGIBLE * (wanted.end - wanted.start)
        assert cascade.ranks in choose(wanted, inputs, free, slack), (cascade.name, free)
        arrived = max((source.end + arrival(source, cascade, cost) for source in inputs), default=0.0)
        start = max(arrived, *(free[rank] for rank in cascade.ranks))
        assert cascade.start == pytest.approx(start, abs=2e-6)
        for rank in cascade.ranks:
            free[rank] = cascade.end
        done[cascade.name] = cascade


def arrival(source: Cascade, reader: Cascade, cost: CostModel) -> float:
    size = cost.handed(source, reader) * GIB
    away = [rank for rank in reader.ranks if rank not in source.ranks]
    return max((handoff_time(cost.cluster, source.ranks[0], rank, size) for rank in away), default=0.0) if size else 0.0


def best(options: Sequence[tuple[int, ...]], *orders: Callable[[tuple[int, ...]], float]) -> list[tuple[int, ...]]:
    """The first option of those that are least by the first order, then by the second, and so on."""
    left = list(options)
    for order in orders:
        least = min(map(order, left))
        left = [option for option in left if order(option) == least]
    return left[:1]


def ready(inputs: Sequence[Cascade]) -> float:
    return max((source.end for source in inputs), default=0.0)


def held(inputs: Sequence[Cascade]) -> set[int]:
    return {rank for source in inputs for rank in source.ranks}


def any_that_start_first(cascade: Cascade, inputs: list[Cascade], free: list[float], slack: float) -> Anything:
    return Anything(cascade.width, free, max(ready(inputs), sorted(free)[cascade.width - 1]) + slack)


class Anything(list[tuple[int, ...]]):
    """All groups of so many ranks that are free by then."""

    def __init__(self, width: int, free: Sequence[float], by: float) -> None:
        super().__init__()
        self.width, self.early = width, {rank for rank, moment in enumerate(free) if moment <= by + 1e-9}

    def __contains__(self, ranks: object) -> bool:
        return isinstance(ranks, tuple) and len({*ranks}) == self.width and self.early.issuperset(ranks)


@given(CASES)
@settings(max_examples=40, deadline=None)
def test_what_is_dealt_out_takes_the_cells_that_are_free_first(
    case: tuple[list[int], list[int], list[float]],
) -> None:
    """Next to each other where they can be; nearest to the inputs; those that idle least; those of the least number."""
    tokens, degrees, starts = case
    cost = in_cells_of_two("2x4:h100-80g", tokens)

    def choose(cascade: Cascade, inputs: list[Cascade], free: list[float], slack: float) -> list[tuple[int, ...]]:
        if cascade.phase is Phase.ENCODE:
            return any_that_start_first(cascade, inputs, free, slack)
        whole = [max(free[first], free[first + 1]) for first in range(0, 8, 2)]
        wanted, near = cascade.width // 2, {rank // 2 for rank in held(inputs)}
        by = max(ready(inputs), sorted(whole)[wanted - 1]) + slack
        early = [cell for cell in range(4) if whole[cell] <= by]
        blocks = [tuple(range(at, at + wanted)) for at in range(0, 4, wanted)]
        chosen = best(
            [block for block in blocks if {*block} <= {*early}] or [()],
            lambda block: -len(near & {*block}),
            lambda block: -sum(whole[cell] for cell in block),
        )[0]
        if not chosen:
            chosen = tuple(sorted(sorted(early, key=lambda cell: (cell not in near, -whole[cell], cell))[:wanted]))
        return [tuple(rank for cell in chosen for rank in (2 * cell, 2 * cell + 1))]

    cascades = scheduled(cost.module, [max(2, degree) for degree in degrees], starts)
    demand_choices(cascades, cell_placements(cascades, cost), cost, choose)


@pytest.mark.parametrize(("late", "cell"), [(0.0, 1), (0.99, 1), (1.0, 1), (1.01, 0)])
@pytest.mark.parametrize("took", [1e-6, 0.5, 30.0, 4000.0])
def test_a_cell_that_holds_the_input_may_be_free_later_by_a_small_part_of_the_time(
    took: float, late: float, cell: int
) -> None:
    cost = in_cells_of_two("1x4:h100-80g", [900])
    encoder, cascade = cost.module.cascades
    source = encoder.with_attrs(start=Quantity(0.0, "ms"), end=Quantity(0.0, "ms"), ranks=(2,))
    times = {"start": Quantity(2.0 * took, "ms"), "end": Quantity(3.0 * took, "ms")}
    free = late * (TOLERANCE + NEGLIGIBLE * (3.0 * took - 2.0 * took))
    ranks = _free_cells(cascade.with_attrs(degree=2, **times), 2, [source], (0.0, 0.0, free, free), cost)
    assert ranks == (2 * cell, 2 * cell + 1)


def in_cells_of_two(cluster: str, tokens: list[int], encoders: int = 1) -> CostModel:
    """The transformer is dealt out over cells of two."""
    costed = module(cluster, tokens, encoders=encoders)
    dit = costed.stages[-1]
    return CostModel(replace(costed, stages=(*costed.stages[:-1], replace(dit, attrs=dit.attrs.updated(cell=2)))))


def test_what_is_dealt_out_waits_for_a_whole_cell_and_what_is_not_takes_any_rank() -> None:
    """Encoders leave the ranks 1 and 3 early: one of each cell. Another encoder takes these, a transformer waits."""
    cost = in_cells_of_two("1x4:h100-80g", [30000, 900, 30000, 900, 900])
    encoders = [c for c in cost.module.cascades if c.phase is Phase.ENCODE]
    (last,) = (c for c in cost.module.cascades if c.phase is Phase.TRAIN and c.clips == (4,))
    begun = [cascade.with_attrs(degree=1) for cascade in encoders]
    apart = replace(last, inputs=()).with_attrs(degree=2)
    cascades = [
        cascade.with_attrs(start=Quantity(float(at), "ms"), end=Quantity(at + cost.time(cascade, cascade.degree), "ms"))
        for at, cascade in enumerate([*begun, apart])
    ]
    *short, wide = cell_placements(cascades, cost)
    assert [cascade.ranks for cascade in short[:4]] == [(0,), (1,), (2,), (3,)]
    assert short[4].ranks == (1,)
    assert wide.ranks in ((0, 1), (2, 3))
    assert wide.start == min(short[0].end, short[2].end) > short[4].end


def test_a_cell_is_chosen_for_the_input_that_comes_last_and_without_inputs_for_now() -> None:
    """A cell that is free by the last input is as good as one that is free at once: the one nearer to them is taken."""
    cost = in_cells_of_two("1x4:h100-80g", [900], encoders=2)
    *encoders, cascade = cost.module.cascades
    times = {"start": Quantity(0.0, "ms"), "end": Quantity(1.0, "ms")}
    wide = cascade.with_attrs(degree=2, **times)
    sources = [
        encoder.with_attrs(start=Quantity(0.0, "ms"), end=Quantity(end, "ms"), ranks=(2,))
        for encoder, end in zip(encoders, (0.0, 5.0), strict=True)
    ]
    assert _free_cells(wide, 2, sources, (0.0, 0.0, 4.0, 4.0), cost) == (2, 3)
    assert _free_cells(wide, 2, sources[:1], (0.0, 0.0, 4.0, 4.0), cost) == (0, 1)
    assert _free_cells(wide, 2, [], (0.0, 0.0, 0.5, 0.5), cost) == (0, 1), "the one that idles least is not free yet"


def test_of_cells_that_are_not_next_to_each_other_those_that_idle_least_are_taken() -> None:
    """One cell of each pair of cells is free when the input comes, the others are not."""
    cost = in_cells_of_two("2x8:h100-80g", [900])
    encoder, cascade = cost.module.cascades
    source = encoder.with_attrs(start=Quantity(0.0, "ms"), end=Quantity(5.0, "ms"), ranks=(15,))
    wide = cascade.with_attrs(degree=4, start=Quantity(0.0, "ms"), end=Quantity(1.0, "ms"))
    by_cell = (1.0, 99.0, 4.0, 99.0, 3.0, 99.0, 99.0, 99.0)
    free = tuple(moment for moment in by_cell for _ in range(2))
    assert _free_cells(wide, 2, [source], free, cost) == (4, 5, 8, 9)
    near = source.with_attrs(ranks=(1,))
    assert _free_cells(wide, 2, [near], free, cost) == (0, 1, 4, 5)
    pairs = tuple(moment for moment in (1.0, 4.0, 3.0, 4.0, 99.0, 99.0, 2.0, 2.0) for _ in range(2))
    assert _free_cells(wide, 2, [source.with_attrs(ranks=(9,))], pairs, cost) == (4, 5, 6, 7), "next to each other"


def test_any_ranks_are_free_together_when_the_last_of_them_is() -> None:
    free = np.array([7.0, 1.0, 5.0, 3.0])
    assert [_free_together(free, count) for count in (1, 2, 3, 4)] == [1.0, 3.0, 5.0, 7.0]


@given(CASES)
@settings(max_examples=40, deadline=None)
def test_a_cascade_waits_for_the_aligned_group_that_is_free_first(
    case: tuple[list[int], list[int], list[float]],
) -> None:
    """Of those in one rack; nearest to the inputs; that idles least."""
    tokens, degrees, starts = case
    costed = module("4x2:l20", tokens, encoders=1)
    attrs = costed.cluster.attrs.updated(rack=2, uplink=Quantity(1.0, "GB/s"))  # type: ignore[union-attr]
    cost = CostModel(replace(costed, cluster=replace(costed.cluster, attrs=attrs)))  # type: ignore[type-var]

    def choose(cascade: Cascade, inputs: list[Cascade], free: list[float], slack: float) -> list[tuple[int, ...]]:
        groups = aligned(cost.cluster, cascade.degree)

        def starts_at(group: tuple[int, ...]) -> float:
            return max(ready(inputs), *(free[rank] for rank in group))

        by = min(map(starts_at, groups)) + slack
        return best(
            [group for group in groups if starts_at(group) <= by],
            lambda group: len({rack_of(cost.cluster, rank) for rank in group}) > 1,
            lambda group: -len(held(inputs) & {*group}),
            lambda group: -round(sum(free[rank] for rank in group), 9),
        )

    cascades = scheduled(cost.module, degrees, starts)
    assert {cascade.degree for cascade in cascades} <= cost.family_degrees
    demand_choices(cascades, family_placements(cascades, cost, math.inf), cost, choose)


def test_a_cascade_goes_anywhere_where_it_ends_so_much_earlier() -> None:
    """Two narrow ones on a pair each: an aligned pair is free after the shorter of them, any pair at once."""
    costed = module("1x4:h100-80g", [6000, 6000, 900], encoders=0)
    cost = CostModel(costed)
    first, second, third = scheduled(costed, (1, 1, 2), (0.0, 0.0, 0.0))
    cascades = [first.with_attrs(ranks=None), second, third]
    waiting = family_placements(cascades, cost, math.inf)
    assert [cascade.ranks for cascade in waiting][:2] == [(0,), (1,)]
    assert waiting[2].ranks == (2, 3)
    crowded = scheduled(module("1x4:h100-80g", [6000, 900, 6000, 900, 900], encoders=0), (1, 1, 1, 1, 2), (0.0,) * 5)
    patient, hasty = (family_placements(crowded, cost_of(crowded), worth) for worth in (math.inf, 1e-3))
    assert patient[4].ranks in ((0, 1), (2, 3))
    assert patient[4].start > hasty[4].start
    assert hasty[4].ranks == (1, 3)
    gained = patient[4].end - hasty[4].end
    same, other = (family_placements(crowded, cost_of(crowded), gained + more)[4] for more in (1e-6, -1e-6))
    assert (same.ranks, other.ranks) == (patient[4].ranks, hasty[4].ranks)


ENOUGH = 100.0 * (1 + NEGLIGIBLE) + TOLERANCE  # ms that are as long as 100 ms


@pytest.mark.parametrize(
    ("looks", "candidates", "tried", "taken"),
    [
        (99, [(150.0, 1.0), (100.1, 1.0), (99.0, 1.0)], 2, 1),  # as long as scheduled, but for a part in a thousand
        (99, [(150.0, 1.0), (ENOUGH, 1.0), (99.0, 1.0)], 2, 1),
        (99, [(150.0, 1.0), (math.nextafter(ENOUGH, 200.0), 1.0), (100.2, 1.0)], 3, 1),
        (99, [(100.0, 1.5), (120.0, 1.0), (130.0, 1.0)], 3, 1),  # a group outside the family has its price
        (99, [(120.0, 1.0), (120.0, 1.0)], 2, 0),
        (4, [(150.0, 1.0), (140.0, 1.0), (130.0, 1.0)], 2, 1),  # as many as there are looks for
        (1, [(150.0, 1.0), (140.0, 1.0)], 1, 0),  # one at least
    ],
)
def test_placements_are_tried_until_one_is_as_long_as_scheduled_and_the_cheapest_is_taken(
    looks: int,
    candidates: list[tuple[float, float]],
    tried: int,
    taken: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costed = module("1x4:h100-80g", [900, 900], encoders=0)
    times = {"start": Quantity(0.0, "ms"), "end": Quantity(100.0, "ms")}
    cascades = [cascade.with_attrs(degree=1, **times) for cascade in costed.cascades]
    placed = [[one.with_attrs(end=Quantity(end, "ms")) for one in cascades] for end, _ in candidates]
    given: list[int] = []
    alone: list[bool] = []

    def candidates_of(_: Sequence[Cascade], __: CostModel, *, one: bool) -> Iterator[list[Cascade]]:
        alone.append(one)
        for number, cascades in enumerate(placed):
            given.append(number)
            yield cascades

    prices = {id(cascades): price for cascades, (_, price) in zip(placed, candidates, strict=True)}
    monkeypatch.setattr(family_placement, "PLACED", looks)
    monkeypatch.setattr(family_placement, "_candidates", candidates_of)
    monkeypatch.setattr(family_placement, "markup", lambda cascades, _: prices[id(cascades)])
    assert family_placement.priced_placement(cascades, CostModel(costed)) is placed[taken]
    assert given == list(range(tried))
    assert alone == [tried == 1]


def test_one_cascade_has_all_the_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    costed = module("1x4:h100-80g", [900], encoders=0)
    (cascade,) = (one.with_attrs(start=Quantity(0.0, "ms"), end=Quantity(100.0, "ms")) for one in costed.cascades)
    placed = [[cascade.with_attrs(degree=1, ranks=(0,), end=Quantity(end, "ms"))] for end in (150.0, 140.0, 130.0)]
    monkeypatch.setattr(family_placement, "PLACED", 2)
    monkeypatch.setattr(family_placement, "_candidates", lambda *_, one: iter(placed if not one else ()))
    assert family_placement.priced_placement([cascade], CostModel(costed)) is placed[1]


def cost_of(cascades: Sequence[Cascade]) -> CostModel:
    return CostModel(module("1x4:h100-80g", [cascade.tokens for cascade in cascades], encoders=0))


def test_encoders_are_late_one_after_another_for_as_many_rounds_as_their_number_has_digits_then_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of five encoders two by themselves, then all five; if that does not fit either, nothing does."""
    costed = module("1x4:h100-80g", [900] * 5, encoders=1)
    cascades = scheduled(costed, (1,), (0.0,))
    names = [cascade.name for cascade in cascades if cascade.phase is Phase.ENCODE]
    lates: list[set[str]] = []
    waiting = iter(names)

    def overfull(*_: object) -> Overflow:
        return Overflow(ValuesFitNowhere(None, 0, "train %1", 2.0, 1.0, 1.0), frozenset({next(waiting)}))

    def noted(turns: object, ranks: object, late: set[str], cost: object) -> tuple[()]:
        lates.append(set(late))
        return ()

    monkeypatch.setattr(placement, "is_roomy", lambda *_: False)
    monkeypatch.setattr(placement, "find_overflow", overfull)
    monkeypatch.setattr(placement, "late_order", noted)
    placed = on_ranks(cascades, CostModel(costed), {cascade.name: (0,) for cascade in cascades})
    with pytest.raises(UserError):
        placement.within_memory(cascades, placed, CostModel(costed))
    assert lates == [set(names[:1]), set(names[:2]), set(names)]
    trained = [cascade for cascade in placed if cascade.phase is Phase.TRAIN]
    assert placement.within_memory(trained, trained, CostModel(costed)) is trained, "no encoder can be late"


@given(CASES, st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_given_ranks_stand_and_every_cascade_starts_as_soon_as_it_can(
    case: tuple[list[int], list[int], list[float]], rng: object
) -> None:
    tokens, degrees, starts = case
    costed = module("2x4:h100-80g", tokens, encoders=1)
    cost, cascades = CostModel(costed), scheduled(costed, degrees, starts)
    ranks = {c.name: tuple(sorted(rng.sample(range(8), c.width))) for c in cascades}  # type: ignore[attr-defined]
    demand_choices(cascades, on_ranks(cascades, cost, ranks), cost, lambda cascade, *_: [ranks[cascade.name]])


def test_producers_come_first_where_starts_are_equal_and_the_last_end_is_the_placements() -> None:
    def at(name: str, start: float, inputs: tuple[str, ...] = ()) -> Cascade:
        times = Attributes.of(start=Quantity(start, "ms"), end=Quantity(start + 3.0, "ms"))
        return Cascade(name, Phase.TRAIN, "dit", (0,), 1, 9, 0, inputs, times)

    a, b, c, d = at("a", 1.0), at("b", 1.0, ("a",)), at("c", 1.0, ("a", "b")), at("d", 0.5)
    assert [cascade.name for cascade in in_order([a, b, c, d])] == ["d", "a", "b", "c"]
    side = at("s", 1.0)
    assert [cascade.name for cascade in in_order([a, b, side, c])] == ["a", "s", "b", "c"]
    assert end_of([a, d]) == 4.0
    assert end_of([]) == 0.0


# -- stages with a place -----------------------------------------------------------------------------------------------


def piped(cluster: str, parts: int, *reduces: Reduce) -> Module:
    costed = module(cluster, [900, 900], encoders=1)
    dit, vae = costed.stages[-1], costed.stages[0]
    stages = tuple(replace(dit, name=f"dit_{n}", attrs=dit.attrs.updated(part_of="dit")) for n in range(parts))
    return replace(costed, stages=(vae, *stages), cascades=tuple(micro_batches(parts)), reductions=reduces)


def micro_batches(parts: int) -> Iterator[Cascade]:
    for clip in range(2):
        before: tuple[str, ...] = ()
        for part in range(parts):
            yield Cascade(f"f{clip}.{part}", Phase.FORWARD, f"dit_{part}", (clip,), 1, 900, 16, before)
            before = (f"f{clip}.{part}",)
        for part in reversed(range(parts)):
            inputs = tuple(dict.fromkeys((*before, f"f{clip}.{part}")))
            yield Cascade(f"b{clip}.{part}", Phase.BACKWARD, f"dit_{part}", (clip,), 1, 900, 16, inputs)
            before = (f"b{clip}.{part}",)


@pytest.mark.parametrize(
    ("cluster", "parts", "ends"),
    [
        ("1x8:h100-80g", 2, [0, 4, 8]),
        ("1x8:h100-80g", 3, [0, 2, 5, 8]),
        ("2x3:h100-80g", 4, [0, 1, 3, 4, 6]),
    ],
)
def test_parts_share_out_the_ranks_in_their_order(cluster: str, parts: int, ends: list[int]) -> None:
    places = stage_places(piped(cluster, parts))
    for part in range(parts):
        assert places[f"dit_{part}"] == tuple(range(ends[part], ends[part + 1]))
    world = piped(cluster, parts).cluster.world  # type: ignore[union-attr]
    assert places["vae0"] == tuple(range(world)), "an encoder lies on all"
    stated = piped(cluster, parts, Reduce("dit_0", (), Attributes.of(ranks=(world - 1,))))
    assert stage_places(stated) == places | {"dit_0": (world - 1,)}
    elsewhere = Reduce("vae0", (), Attributes.of(ranks=(0,)))
    assert stage_places(piped(cluster, parts, elsewhere)) == places, "what lies everywhere has no place of its own"


@given(st.integers(1, 3), st.sampled_from([1, 2]), st.booleans())
@settings(max_examples=20, deadline=None)
def test_backwards_run_where_their_forward_ran_and_forwards_on_their_stages_place(
    parts: int, degree: int, assigned: bool
) -> None:
    costed = piped("2x4:h100-80g", parts)
    cost, places = CostModel(costed), stage_places(costed)
    cascades = []
    for number, cascade in enumerate(costed.cascades):
        times = {"start": Quantity(10.0 * number, "ms"), "end": Quantity(10.0 * number + 9.0, "ms")}
        place = places[cascade.stage][-degree:] if assigned and cascade.phase is Phase.FORWARD else None
        cascades.append(cascade.with_attrs(degree=degree, assigned=place, **times))

    def choose(cascade: Cascade, inputs: list[Cascade], free: list[float], slack: float) -> list[tuple[int, ...]]:
        if cascade.phase is Phase.BACKWARD:
            return [source.ranks for source in inputs if (source.stage, source.phase) == (cascade.stage, Phase.FORWARD)]
        if assigned:
            return [places[cascade.stage][-degree:]]
        own = [free[rank] if rank in places[cascade.stage] else math.inf for rank in range(8)]
        return Anything(degree, own, max(ready(inputs), sorted(own)[degree - 1]) + slack)

    placed = staged_placements(cascades, cost, places)
    demand_choices(cascades, placed, cost, choose)
    assert not any("assigned" in cascade.attrs for cascade in placed)


def test_parts_that_are_more_than_ranks_share_some() -> None:
    places = stage_places(piped("1x2:h100-80g", 4))
    assert [places[f"dit_{part}"] for part in range(4)] == [(0,), (0,), (1,), (1,)]


def test_a_place_that_is_too_small_is_refused_and_one_that_is_as_large_is_not() -> None:
    costed = piped("1x4:h100-80g", 2)
    cost = CostModel(costed)
    times = {"start": Quantity(0.0, "ms"), "end": Quantity(9.0, "ms")}
    forward = costed.cascades[0].with_attrs(degree=2, **times)
    assert staged_placements([forward], cost, {"dit_0": (2, 3)})[0].ranks == (2, 3)
    with pytest.raises(UserError) as refused:
        staged_placements([forward], cost, {"dit_0": (2,)})
    assert isinstance(refused.value.diagnostics[0], PlaceTooSmall)


def test_a_module_is_a_pipeline_where_a_trained_stage_has_cascades_of_its_own() -> None:
    costed = piped("1x4:h100-80g", 2)
    assert is_pipeline(costed)
    frozen = tuple(replace(stage, trained=False) for stage in costed.stages)
    assert not is_pipeline(replace(costed, stages=frozen))
    encoded = module("1x4:h100-80g", [900], encoders=1)
    assert not is_pipeline(encoded)
    mixed = (*encoded.cascades[:1], *costed.cascades)
    assert is_pipeline(replace(costed, cascades=mixed)) and is_pipeline(replace(costed, cascades=mixed[::-1]))


@pytest.mark.parametrize("later", [False, True])
def test_fewer_groups_are_taken_where_memory_lets_them_end_by_the_price_of_one_and_not_after_it(
    later: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    costed = module("1x4:h100-80g", [900], encoders=0)
    latest = 100.0 * (1 + family_placement.PRICE) + TOLERANCE
    end = math.nextafter(latest, 200.0) if later else latest
    best, fewer, fitted = (
        [cascade.with_attrs(end=Quantity(ms, "ms")) for cascade in costed.cascades] for ms in (100.0, 99.0, end)
    )
    monkeypatch.setattr(family_placement, "priced_placement", lambda *_: best)
    monkeypatch.setattr(family_placement, "moved", lambda *_: fewer)
    monkeypatch.setattr(family_placement, "within_memory", lambda *_: fitted)
    assert placed_on_few_groups(costed.cascades, CostModel(costed)) is (best if later else fitted)


def test_a_pipeline_may_have_encoders_beside_it() -> None:
    costed = module("1x4:h100-80g", [900], encoders=1)
    encoder, cascade = costed.cascades
    assert not is_pipeline(costed)
    assert is_pipeline(replace(costed, cascades=(encoder, replace(cascade, phase=Phase.FORWARD))))
    assert not is_pipeline(replace(costed, cascades=(replace(encoder, phase=Phase.FORWARD),))), "it is not trained"
