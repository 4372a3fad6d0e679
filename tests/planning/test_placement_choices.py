"""Placements: every way of placing keeps to the schedule's order, and none is longer than what it is to beat."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.analysis.communicators import aligned
from arachnec.cluster.topology import handoff_time, rack_of
from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Cascade, Module, Phase, Reduce
from arachnec.ir.values import Attributes, Quantity
from arachnec.planning.cascade_ranks import TOLERANCE, on
from arachnec.planning.family_placement import PRICE, family_placements, markup, placed_on_few_groups, priced_placement
from arachnec.planning.pipeline_places import is_pipeline, stage_places, staged_placements
from arachnec.planning.placement import (
    best_placements,
    cell_placements,
    end_of,
    in_cells,
    in_order,
    on_ranks,
    placements,
    quick_placements,
)
from tests.planning.costed_modules import module

GIB = 2**30
CLUSTERS = ("1x4:h100-80g", "2x4:h100-80g", "4x2:l20", "1x4:h100-80g+1x4:a100-80g", "8:cpu")
TOKENS = (60, 500, 900, 4000, 9000)
Way = Callable[[Sequence[Cascade], CostModel], list[Cascade]]
FREE: dict[str, Way] = {
    "free": placements,
    "spread": lambda cascades, cost: placements(cascades, cost, topology=False),
    "family": lambda cascades, cost: family_placements(cascades, cost, math.inf),
    "worth 2 ms": lambda cascades, cost: family_placements(cascades, cost, 2.0),
    "priced": priced_placement,
    "few groups": placed_on_few_groups,
    "best": best_placements,
}


def timed(cascade: Cascade, start: float, end: float, degree: int = 1, ranks: tuple[int, ...] = ()) -> Cascade:
    times = {"start": Quantity(start, "ms"), "end": Quantity(end, "ms")}
    return cascade.with_attrs(degree=degree, ranks=ranks or None, **times)


def in_racks(costed: Module, nodes: int, uplink: float = 1.0) -> Module:
    """Racks of so many nodes."""
    assert costed.cluster is not None
    attrs = costed.cluster.attrs.updated(rack=nodes, uplink=Quantity(uplink, "GB/s"))
    return replace(costed, cluster=replace(costed.cluster, attrs=attrs))


def in_cells_of_two(costed: Module) -> Module:
    """The transformer is dealt out over cells of two."""
    *others, dit = costed.stages
    return replace(costed, stages=(*others, replace(dit, attrs=dit.attrs.updated(cell=2))))


def scheduled(costed: Module, rng: Random, degrees: Sequence[int]) -> list[Cascade]:
    """Cascades of drawn degrees, each as soon as its inputs are there and so many ranks free, or some ms later."""
    cost, done = CostModel(costed), dict[str, Cascade]()
    free = [0.0] * cost.cluster.world
    for cascade in costed.cascades:
        degree = rng.choice(degrees) if cascade.phase is Phase.TRAIN else 1
        free.sort()
        begin = max(free[degree - 1], *(done[name].end for name in cascade.inputs), 0.0) + rng.choice((0.0, 0.0, 9.0))
        done[cascade.name] = timed(cascade, begin, begin + cost.time(cascade, degree), degree)
        free[:degree] = [done[cascade.name].end] * degree
    return list(done.values())


def arrival(source: Cascade, reader: Cascade, cost: CostModel) -> float:
    size = cost.handed(source, reader) * GIB
    away = [rank for rank in reader.ranks if rank not in source.ranks]
    return max((handoff_time(cost.cluster, source.ranks[0], rank, size) for rank in away), default=0.0) if size else 0.0


def require_early(cascades: Sequence[Cascade], placed: Sequence[Cascade], cost: CostModel) -> None:
    """In the order of the schedule every cascade starts as soon as its ranks and inputs are there, and takes no less
    than it needs."""
    free = [0.0] * cost.cluster.world
    done: dict[str, Cascade] = {}
    for wanted, cascade in zip(in_order(cascades), placed, strict=True):
        assert wanted.name == cascade.name
        assert len({*cascade.ranks}) == wanted.width
        arrived = [done[name].end + arrival(done[name], cascade, cost) for name in cascade.inputs if name in done]
        assert cascade.start == pytest.approx(max(0.0, *arrived, *(free[rank] for rank in cascade.ranks)), abs=2e-6)
        assert cascade.end - cascade.start >= cost.time(wanted, wanted.width, ranks=cascade.ranks) * 0.999 - 2e-6
        for rank in cascade.ranks:
            free[rank] = cascade.end
        done[cascade.name] = cascade


def priced(placed: Sequence[Cascade], cost: CostModel) -> float:
    return end_of(placed) * markup(placed, cost)


@settings(max_examples=25)
@given(st.randoms(use_true_random=False), st.sampled_from(CLUSTERS), st.booleans(), st.integers(0, 2))
def test_every_way_of_placing_is_early_and_what_chooses_is_no_longer_than_what_it_chooses_from(
    rng: Random, cluster: str, racks: bool, encoders: int
) -> None:
    costed = module(cluster, rng.choices(TOKENS, k=rng.randint(3, 8)), encoders=encoders)
    costed = in_racks(costed, 2, rng.choice((0.05, 1.0, 20.0))) if racks and cluster == "4x2:l20" else costed
    cost, cascades = CostModel(costed), scheduled(costed, rng, (1, 1, 2, 3, 4))
    placed = {name: place(cascades, cost) for name, place in FREE.items()}
    for rows in placed.values():
        require_early(cascades, rows, cost)
        assert end_of(rows) >= max(cost.time(cascade, cascade.width) for cascade in cascades) * 0.5
    enough = end_of(cascades) * 1.001 + TOLERANCE
    quick = list(quick_placements(cascades, cost))
    assert end_of(placed["best"]) <= max(enough, min(map(end_of, quick)))
    assert priced(placed["priced"], cost) <= max(enough, priced(placed["free"], cost), enough * (1 + PRICE))
    assert end_of(placed["few groups"]) <= end_of(placed["priced"]) * (1 + PRICE) + TOLERANCE
    for cascade in placed["family"]:
        inside = cascade.width in cost.family_degrees and not cost.devices.kinds
        assert not inside or cascade.ranks in aligned(cost.cluster, cascade.width)


@settings(max_examples=15)
@given(st.randoms(use_true_random=False), st.sampled_from(["2x4:h100-80g", "4x2:l20"]))
def test_what_is_dealt_out_takes_whole_cells(rng: Random, cluster: str) -> None:
    costed = in_cells_of_two(module(cluster, rng.choices(TOKENS, k=rng.randint(2, 7)), encoders=1))
    cost, cascades = CostModel(costed), scheduled(costed, rng, (2, 4, 8))
    placed = cell_placements(cascades, cost)
    require_early(cascades, placed, cost)
    for cascade in placed:
        cells = {rank // 2 for rank in cascade.ranks}
        assert cascade.phase is Phase.ENCODE or len(cells) == cascade.width // 2
    assert end_of(best_placements(cascades, cost)) <= end_of(placed) + TOLERANCE


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


# -- the last cascade, against all ranks that it could have ------------------------------------------------------------


def soonest(last: Cascade, before: Sequence[Cascade], cost: CostModel) -> float:
    """The earliest end of all."""
    free = [0.0] * cost.cluster.world
    for cascade in before:
        for rank in cascade.ranks:
            free[rank] = cascade.end
    inputs = [cascade for cascade in before if cascade.name in last.inputs]
    groups = combinations(range(cost.cluster.world), last.width)
    return min(on(last, ranks, inputs, free, cost).end for ranks in groups)


@pytest.mark.parametrize("uplink", [0.01, 6.0])
@pytest.mark.parametrize("ends", [(10.0, 40.0, 10.0, 90.0), (10.0, 10.0, 40.0, 90.0), (40.0, 90.0, 10.0, 12.0)])
def test_a_cascade_waits_for_a_rack_where_it_ends_earlier_so(uplink: float, ends: tuple[float, ...]) -> None:
    costed = in_racks(module("4x1:l20", [4000] * 5), 2, uplink)
    *narrow, wide = costed.cascades
    cost = CostModel(costed)
    assert cost.time(wide, 2, ranks=(0, 1)) < cost.time(wide, 2, ranks=(0, 2))
    rows = [timed(cascade, 0.0, end) for cascade, end in zip(narrow, ends, strict=True)]
    *before, placed = placements([*rows, timed(wide, sorted(ends)[1], 99.0, 2)], cost)
    assert placed.end <= soonest(timed(wide, 0.0, 1.0, 2), before, cost) * 1.001 + TOLERANCE


@pytest.mark.parametrize("place", [placements, lambda cascades, cost: family_placements(cascades, cost, math.inf)])
@pytest.mark.parametrize("busy", [(), (0,), (4,), (0, 1, 2), (4, 5, 6, 7)])
def test_where_devices_differ_a_cascade_goes_where_it_ends_first(busy: tuple[int, ...], place: Way) -> None:
    costed = module("1x4:h100-80g+1x4:a100-80g", [900] * 8 + [4000])
    cost = CostModel(costed)
    *narrow, last = costed.cascades
    before = [timed(cascade, 0.0, 1.0) for cascade in narrow[: len(busy)]]
    *before, placed = place([*before, timed(last, 1.0, 2.0, 4)], cost)
    assert placed.end <= soonest(timed(last, 0.0, 1.0, 4), before, cost) * 1.001 + TOLERANCE


# -- groups ------------------------------------------------------------------------------------------------------------


def test_a_cascade_goes_anywhere_where_it_ends_so_much_earlier() -> None:
    costed = module("1x4:h100-80g", [6000, 900, 6000, 900, 900])
    cost = CostModel(costed)
    degrees = (1, 1, 1, 1, 2)
    rows = [
        timed(c, at, at + cost.time(c, d), d) for at, (c, d) in enumerate(zip(costed.cascades, degrees, strict=True))
    ]
    patient, hasty = (family_placements(rows, cost, worth)[4] for worth in (math.inf, 1e-3))
    assert patient.ranks in aligned(cost.cluster, 2)
    assert patient.start > hasty.start
    gained = patient.end - hasty.end
    for worth, end in ((gained + 1e-6, patient.end), (gained - 1e-6, hasty.end)):
        assert family_placements(rows, cost, worth)[4].end == pytest.approx(end)


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


@pytest.mark.parametrize(("nodes", "gpus", "rack", "size"), [(6, 1, 3, 2), (6, 2, 3, 4), (6, 2, 3, 2), (4, 2, 2, 8)])
def test_of_groups_that_start_together_one_in_a_rack_is_taken(nodes: int, gpus: int, rack: int, size: int) -> None:
    costed = in_racks(module(f"{nodes}x{gpus}:l20", [900], encoders=1), rack)
    encoder, cascade = costed.cascades
    cost = CostModel(costed)
    *_, placed = family_placements([timed(encoder, 0.0, 1.0), timed(cascade, 1.0, 2.0, size)], cost, math.inf)

    def racks(ranks: Sequence[int]) -> int:
        return len({rack_of(cost.cluster, rank) for rank in ranks})

    assert racks(placed.ranks) == min(map(racks, aligned(cost.cluster, size)))


@settings(max_examples=20)
@given(st.randoms(use_true_random=False))
def test_given_ranks_stand_and_every_cascade_starts_as_soon_as_it_can(rng: Random) -> None:
    costed = module("2x4:h100-80g", rng.choices(TOKENS, k=rng.randint(2, 7)), encoders=1)
    cost, cascades = CostModel(costed), scheduled(costed, rng, (1, 2, 4, 8))
    ranks = {cascade.name: tuple(sorted(rng.sample(range(8), cascade.width))) for cascade in cascades}
    placed = on_ranks(cascades, cost, ranks)
    require_early(cascades, placed, cost)
    assert {cascade.name: cascade.ranks for cascade in placed} == ranks


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
        times = {"start": Quantity(100.0 * number, "ms"), "end": Quantity(100.0 * number + 90.0, "ms")}
        place = places[cascade.stage][-degree:] if assigned and cascade.phase is Phase.FORWARD else None
        cascades.append(cascade.with_attrs(degree=degree, assigned=place, **times))

    placed = staged_placements(cascades, cost, places)
    require_early(cascades, placed, cost)
    ran = {(cascade.stage, cascade.clips): cascade.ranks for cascade in placed if cascade.phase is Phase.FORWARD}
    for cascade in placed:
        assert cascade.ranks == ran[cascade.stage, cascade.clips]
        assert {*cascade.ranks} <= {*places[cascade.stage]}
        assert not assigned or cascade.ranks == places[cascade.stage][-degree:]
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
    with pytest.raises(UserError, match="takes 2 ranks, and stage @dit_0 lies on 1 rank"):
        staged_placements([forward], cost, {"dit_0": (2,)})


def test_a_module_is_a_pipeline_where_a_trained_stage_has_cascades_of_its_own() -> None:
    costed = piped("1x4:h100-80g", 2)
    assert is_pipeline(costed)
    frozen = tuple(replace(stage, trained=False) for stage in costed.stages)
    assert not is_pipeline(replace(costed, stages=frozen))
    encoded = module("1x4:h100-80g", [900], encoders=1)
    assert not is_pipeline(encoded)
    mixed = (*encoded.cascades[:1], *costed.cascades)
    assert is_pipeline(replace(costed, cascades=mixed)) and is_pipeline(replace(costed, cascades=mixed[::-1]))


def test_a_pipeline_may_have_encoders_beside_it() -> None:
    costed = module("1x4:h100-80g", [900], encoders=1)
    encoder, cascade = costed.cascades
    assert not is_pipeline(costed)
    assert is_pipeline(replace(costed, cascades=(encoder, replace(cascade, phase=Phase.FORWARD))))
    assert not is_pipeline(replace(costed, cascades=(replace(encoder, phase=Phase.FORWARD),))), "it is not trained"
