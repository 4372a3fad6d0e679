"""Degrees, clips side by side, halves of a backward: held against trying all, and against their parts."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.cluster.file import parse_cluster
from arachnec.cost.model import CostModel
from arachnec.cost.strategy import (
    Attention,
    Strategy,
    even_ranks,
    first_ranks,
    grid_of,
    legal_degrees,
    sides,
    wide_steps,
    widest_ulysses,
)
from arachnec.ir.nodes import Cascade, Level, Module, Phase, Stage
from arachnec.ir.values import Attributes, Formula, Quantity, Term, Value

BS2, BS, BT = (("B", 1), ("S", 2)), (("B", 1), ("S", 1)), (("B", 1), ("T", 1))
TOKENS, TEXT = 24_000, 100


def formula(unit: str, *terms: tuple[float, tuple[tuple[str, int], ...]]) -> Formula:
    return Formula(tuple(Term(value, powers) for value, powers in terms), unit)


def stage(**changed: Value | None) -> Stage:
    values: dict[str, Value | None] = {
        "heads": 12, "attentions": 4, "params": 10**8, "state": Quantity(1.0, "GiB"),
        "layers": tuple((f"blocks.{number}", 10**7) for number in range(4)),
        "forward": formula("ms", (1e-6, BS2), (1e-2, BS), (3e-2, BT), (3.0, ())),
        "backward": formula("ms", (2e-6, BS2), (2e-2, BS), (5e-2, BT), (6.0, ())),
        "traffic": formula("GiB", (3e-5, BS)), "saved": formula("GiB", (1e-4, BS)),
    }  # fmt: skip
    return Stage("dit", True, Attributes.of(**{**values, **changed}))


def cascade(phase: Phase = Phase.TRAIN, batch: int = 1, name: str = "c", **attrs: Value | None) -> Cascade:
    return Cascade(name, phase, "dit", tuple(range(batch)), batch, TOKENS, TEXT, (), Attributes.of(**attrs))


def model(of: Stage, *cascades: Cascade, cluster: str = "2x8:h100-80g") -> CostModel:
    module = Module("m", Level.COSTED, parse_cluster(cluster), stages=(of,), cascades=cascades or (cascade(),))
    return CostModel(module)


def test_the_widest_ulysses_takes_as_many_ranks_as_there_are_heads_for() -> None:
    """And a ring the rest; 0 heads are any number."""
    for degree, heads in product(range(1, 37), range(37)):
        grid = widest_ulysses(degree, heads)
        assert grid.ulysses * grid.ring == degree
        wider = [ulysses for ulysses in range(grid.ulysses + 1, degree + 1) if degree % ulysses == 0]
        if heads:
            assert grid.ulysses <= heads
            assert all(ulysses > heads for ulysses in wider)
        else:
            assert not wider


# -- degrees -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 12), st.integers(1, 24), st.lists(st.integers(1, 12), max_size=4), st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_clips_lie_side_by_side_where_they_and_their_ranks_divide(
    batch: int, ranks: int, listed: list[int], most: int
) -> None:
    legal, limit = tuple(listed) or None, most or None
    own = stage(cell=2, degrees=legal, most_clips=limit)
    expected = []
    for side in range(1, 100):
        clips, degree = batch / side, ranks / side
        whole = clips == int(clips) and degree == int(degree) and clips >= 1 and degree >= 1
        if whole and (not limit or clips <= limit) and (legal is None or degree in legal):
            expected.append(side)
    short = replace(cascade(batch=batch), tokens=5)
    assert sides(cascade(batch=batch), own, ranks) == tuple(expected)
    assert sides(short, own, ranks) == tuple(side for side in expected if ranks // side <= 5)
    assert sides(replace(short, tokens=0), own, ranks) == tuple(side for side in expected if ranks == side)
    for whole_stage in (stage(), stage(cell=1)):
        assert sides(cascade(batch=batch), whole_stage, ranks) == (1,), "what is whole everywhere"
    branches = cascade(Phase.DENOISE, steps=(0, 3), branches=batch)
    assert sides(branches, stage(), ranks) == tuple(n for n in range(1, 13) if batch % n == 0 and ranks % n == 0)


@given(st.integers(1, 300), st.sampled_from([1, 4, 6, 8, 12]))
@settings(max_examples=60, deadline=None)
def test_wide_degrees_come_in_steps_of_eight_and_of_whole_nodes_at_least(largest: int, gpus: int) -> None:
    steps = wide_steps(largest, gpus)
    assert steps == tuple(sorted({*steps}))
    whole_nodes = range(gpus, largest + 1, gpus) if gpus >= 8 else ()
    assert {*range(1, min(largest, 64) + 1), *range(8, largest + 1, 8), *whole_nodes, largest} <= {*steps}
    assert max(steps) == largest


def test_legal_are_measured_degrees_whole_cells_listed_ones_or_what_has_a_token_each() -> None:
    pod = parse_cluster("2x8:h100-80g")
    times = ((4, Quantity(1.0, "ms")), (2, Quantity(2.0, "ms")), (17, Quantity(1.0, "ms")), (16, Quantity(1.0, "ms")))
    assert legal_degrees(cascade(times=times), stage(cell=4), pod) == (2, 4, 16)
    assert legal_degrees(cascade(), stage(cell=4, degrees=(1, 2)), pod) == (4, 8, 12, 16)
    assert legal_degrees(cascade(), stage(cell=1, degrees=(16, 2, 17)), pod) == (2, 16)
    assert legal_degrees(replace(cascade(), tokens=3), stage(), pod) == (1, 2, 3)
    assert legal_degrees(replace(cascade(), tokens=0), stage(), pod) == (1,)
    encode = cascade(Phase.ENCODE, batch=3)
    assert legal_degrees(encode, stage(), pod) == (1, 2, 3)
    assert legal_degrees(encode, stage(divides=5), pod) == (1, 2, 3, 4, 5)
    assert legal_degrees(encode, stage(divides=2), pod) == (1, 2, 3)


def test_the_familys_degrees_are_one_rank_and_the_products_of_its_grids() -> None:
    assert model(stage(), cluster="1x1:h100-80g").family_degrees == {1}
    cost = model(stage())
    assert cost.family_degrees == {1} | {ulysses * ring for ulysses, ring in cost.family_grids}
    assert {1, 2, 4, 8, 16} <= cost.family_degrees


# -- clips side by side ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("phase", [Phase.TRAIN, Phase.FORWARD])
def test_clips_side_by_side_take_what_one_of_them_takes_on_its_ranks(phase: Phase) -> None:
    own = stage(cell=2)
    four = cascade(phase, batch=4)
    cost = model(own, four)
    times = {}
    for side, ranks in ((1, 8), (2, 8), (4, 8)):
        one = replace(four, batch=4 // side)
        times[side] = cost.time(four, ranks, side=side, ulysses=ranks // side)
        assert times[side] == pytest.approx(cost.time(one, ranks // side, side=1, ulysses=ranks // side))
        within = tuple(range(8, 8 + ranks))
        assert cost.time(four, ranks, side=side, ranks=within, ulysses=ranks // side) == times[side]
    assert len({round(ms, 6) for ms in times.values()}) == 3
    cheapest = [cost.time(four, 8, side=side) for side in (1, 2, 4)]
    assert cost.time(four, 8) == min(cheapest) < max(cheapest)
    assert cost.side_at(four, 8) == (1, 2, 4)[cheapest.index(min(cheapest))]
    assert cost.table.fitting(four, 8).time == min(cheapest)  # type: ignore[union-attr]
    assert model(stage(), four).side_at(four, 8) == 1


def test_branches_side_by_side_gather_what_each_predicts_every_step() -> None:
    """Two branches of three steps on two ranks each: half of the predictions a step, then all four gather both."""
    own = stage(output=formula("GiB", (1e-6, BS)))
    both = cascade(Phase.DENOISE, steps=(2, 4), branches=2)
    one = both.with_attrs(branches=1)
    cost = model(own, both)
    both_branches = 2 * 3 * 1e-6 * TOKENS * 2**30
    gathered = both_branches * 3 / 4 / (450 * 1e6) + 3 * 1 * 0.010  # three quarters come from others, a latency a step
    more = cost.time(both, 4, side=2, ulysses=2) - cost.time(one, 2, side=1, ulysses=2)
    assert more == pytest.approx(gathered)
    assert cost.time(both, 2, side=1, ulysses=2) > cost.time(one, 2, side=1, ulysses=2)


def test_measured_times_are_those_of_all_ranks_however_clips_lie_on_them() -> None:
    times = ((2, Quantity(70.0, "ms")), (8, Quantity(30.0, "ms")))
    four = cascade(batch=4, times=times)
    cost = model(stage(cell=2), four)
    assert cost.table.entry(four, 8, strategy=Strategy(Attention(2, 1), side=4)).time == 30.0
    assert cost.table.entry(four, 8, strategy=Strategy(Attention(8, 1), side=1)).time == 30.0
    mixed = model(stage(), four, cluster="1x8:h100-80g+1x8:a100-80g")
    slower = mixed.devices.slowdown((8,))
    assert slower > 1
    assert mixed.time(four, 8, ranks=tuple(range(8, 16))) == pytest.approx(30.0 * slower)


# -- grids -------------------------------------------------------------------------------------------------------------


def test_ranks_that_are_given_stand_whatever_nodes_are_asked_for() -> None:
    cost, ranks = model(stage()), (0, 1, 2, 3)
    assert cost.time(cascade(), 4, ranks=ranks, spans_nodes=2) == cost.time(cascade(), 4, ranks=ranks)
    assert cost.time(cascade(), 4, spans_nodes=2) == cost.time(cascade(), 4, ranks=(0, 1, 8, 9))


# -- what a cascade is made of -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_the_halves_of_a_backward_compute_what_the_whole_does(degree: int) -> None:
    """Products with parameters have two gradients that take alike; attention has none but its inputs'."""
    whole, first = cascade(Phase.BACKWARD, name="b"), cascade(Phase.BACKWARD, name="i")
    second = replace(cascade(Phase.WEIGHT, name="w"), inputs=("i",))
    compute = model(stage(), whole, first, second).table.compute
    took = [compute.time(c, degree, Attention(degree, 1), 0, 1.0) for c in (whole, first, second)]
    products = (2e-2 * TOKENS / degree + 5e-2 * TEXT + 6.0) / 2
    pairs = 2e-6 * TOKENS**2 * math.ceil(12 / degree) / 12
    assert took == pytest.approx([2 * products + pairs, products + pairs, products])
    measured = stage(activation=formula("ms", (7.0, ())), weight=formula("ms", (5.0, ())))
    own = model(measured, whole, first, second).table.compute
    assert [own.time(c, degree, Attention(degree, 1), 0, 1.0) for c in (whole, first, second)] == [took[0], 7.0, 5.0]


def test_a_slow_device_takes_longer_for_all_but_what_is_launched() -> None:
    compute = model(stage()).table.compute
    plain, slow = (compute.time(cascade(), 4, Attention(4, 1), 0, slowdown) for slowdown in (1.0, 2.5))
    assert slow - 9.0 == pytest.approx(2.5 * (plain - 9.0))
    coder = model(stage(divides=4, undivided=0.2)).table.compute
    shared = cascade(Phase.ENCODE, batch=2)
    work = 2 * (1e-6 * TOKENS**2 + 1e-2 * TOKENS + 3e-2 * TEXT) / 2
    share = 0.2 + 0.8 / 4
    right = 2 * (3.0 + work * share * 2.5)
    assert coder.time(shared, 4, Attention(4, 1), 0, 2.5) == pytest.approx(right)
    clip = shared.with_attrs(per_clip=Quantity(50.0, "ms"))
    assert coder.time(clip, 4, Attention(4, 1), 0, 2.5) == pytest.approx(2 * 50.0 * share * 2.5)
    assert coder.time(clip, 2, Attention(2, 1), 0, 2.5) == pytest.approx(50.0 * 2.5), "as many ranks as clips"


@pytest.mark.parametrize(("divides", "shared"), [(0, False), (1, False), (2, True)])
def test_an_encoder_is_shared_where_it_can_be_divided_in_two(divides: int, shared: bool) -> None:
    compute = model(stage(divides=divides)).table.compute
    times = [compute.time(cascade(Phase.ENCODE), degree, Attention(degree, 1), 0, 1.0) for degree in (1, 2)]
    assert (times[1] < times[0]) == shared


# -- the memory's edge -------------------------------------------------------------------------------------------------


def test_what_fits_to_the_last_byte_fits() -> None:
    """One formula without sizes is the room itself; the next number above it is too much."""
    room = model(stage(saved=None)).room_on(None, 1)
    exact, above = (formula("GiB", (gib, ())) for gib in (room, math.nextafter(room, math.inf)))
    twice, less = formula("GiB", (2 * room, ())), formula("GiB", (room / 2, ()))
    assert model(stage(saved=exact)).recompute_at(cascade(), 1) == 0
    assert model(stage(saved=above)).recompute_at(cascade(), 1) is None
    assert model(stage(saved=twice, saved_recompute=exact)).recompute_at(cascade(), 1) == 4
    assert model(stage(saved=above, saved_recompute=above)).recompute_at(cascade(), 1) is None
    assert model(stage(saved=above, saved_recompute=less)).recompute_at(cascade(), 1) == 1


def test_layers_gathered_in_cells_count_at_both_moments_of_a_train_cascade() -> None:
    """At the end of the forward two layers are whole; in the backward also the gradients of two."""
    whole, parts = stage(dtype="bf16", layer_params=(10**9,) * 4, params=4 * 10**9, trained=4 * 10**7), {}
    heads = {"head": (formula("GiB", (0.0, ())), formula("GiB", (30.0, ()))), "recomputing": formula("GiB", (1e-5, BS))}
    quiet = {"head": (formula("GiB", (0.0, ())), formula("GiB", (0.0, ()))), "recomputing": formula("GiB", (1e-5, BS))}
    for name, more in (("forward", heads), ("backward", quiet)):
        alone, dealt = (replace(whole, attrs=whole.attrs.updated(cell=cell, **more)) for cell in (None, 2))
        parts[name] = model(dealt).memory(cascade(), 2) - model(alone).memory(cascade(), 2)
    layer = 10**9 * 2 / 2**30
    trained = 10**7 * 2 / 2**30
    assert parts["forward"] == pytest.approx(2 * layer)
    assert parts["backward"] == pytest.approx(2 * layer + 2 * trained)


@pytest.mark.parametrize("degree", range(1, 13))
def test_a_product_of_ulysses_and_ring_is_the_degree_or_refused(degree: int) -> None:
    """With one factor the other follows; factors below one are none."""
    assert grid_of(degree, None, None) is None
    factors = (None, *range(-degree, degree + 2))
    for ulysses, ring in ((u, r) for u in factors for r in factors if (u, r) != (None, None)):
        fitting = [
            Attention(u, degree // u)
            for u in range(1, degree + 1)
            if degree % u == 0 and ulysses in (None, u) and ring in (None, degree // u)
        ]
        if fitting:
            assert [grid_of(degree, ulysses, ring)] == fitting
        else:
            asked = ulysses if ulysses is not None else degree // sorted((1, ring or 0))[1]
            around = ring if ring is not None else degree // sorted((1, asked))[1]
            with pytest.raises(ValueError, match=f"^ulysses {asked} times ring {around} is not degree {degree}$"):
                grid_of(degree, ulysses, ring)


def test_the_first_branch_has_an_even_part_of_the_ranks_or_what_the_other_leaves() -> None:
    """Memory counts the ranks of the smaller branch, twice."""
    for width in range(1, 13):
        for side in (None, 1, 2, 3):
            assert first_ranks(Strategy(side=side), width) == width // (side or 1)
            assert even_ranks(Strategy(side=side), width) == width
        for ulysses, ring in ((u, r) for u in range(1, 4) for r in range(1, 4) if u * r < width):
            uneven = Strategy(side=2, unconditional=Attention(ulysses, ring))
            assert first_ranks(uneven, width) == width - ulysses * ring
            assert even_ranks(uneven, width) == 2 * sorted((ulysses * ring, width - ulysses * ring))[0]


def test_one_clip_lies_beside_none_where_nothing_fits_and_what_is_whole_everywhere_has_one_side() -> None:
    """Measured or not, at that degree or another."""
    four = cascade(batch=4)
    huge = stage(cell=2, saved=formula("GiB", (1e3, BS)))
    assert model(huge, four).table.fitting(four, 4) is None
    assert model(huge, four).side_at(four, 4) == 1
    assert Strategy().sides == 1
    assert [Strategy(side=side).sides for side in (1, 2, 3)] == [1, 2, 3]
    timed = cascade(batch=4, times=((2, Quantity(1.0, "ms")),))
    for whole in (stage(), stage(cell=1)):
        assert [model(whole, timed).side_at(timed, ranks) for ranks in (1, 2, 3)] == [1, 1, 1]


@pytest.mark.parametrize("cell", [2, 3, 4, 5])
def test_parameters_dealt_out_leave_whole_cells_up_to_all_ranks(cell: int) -> None:
    for nodes, gpus in ((1, 1), (1, 2), (1, 3), (1, 4), (1, 7), (2, 4), (3, 3)):
        pod = parse_cluster(f"{nodes}x{gpus}:h100-80g")
        whole = tuple(degree for degree in range(1, nodes * gpus + 1) if degree / cell in range(1, 99))
        assert legal_degrees(cascade(), stage(cell=cell), pod) == whole


@pytest.mark.parametrize("cell", [None, 2])
@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("layer", [10**5, 10**10])
def test_a_clips_ranks_wait_for_their_hosts_beside_what_all_of_them_compute(
    layer: int, degree: int, cell: int | None
) -> None:
    """Less what they would wait for each other. Pairs are divided over all ranks: a longer forward hides more."""
    layers = tuple((f"blocks.{number}", layer) for number in range(4))
    sizes = {"layers": layers, "layer_params": (layer,) * 4, "params": 5 * layer, "cell": cell}
    cost = model(stage(host=("optimizer", "parameters"), dtype="bf16", **sizes))
    pairs, linear = TOKENS**2 / degree, TOKENS / degree
    forward = 1e-6 * pairs + 1e-2 * linear + 3e-2 * TEXT + 3.0
    backward = 2e-6 * pairs + 2e-2 * linear + 5e-2 * TEXT + 6.0
    clip, wait = cascade(), cost.table.transfers.exposed
    waits = wait(clip, forward, backward, 0.0) - cost.table.gathering.exposed(clip, forward, backward)
    one, two = cascade(degree=degree), cascade(degree=degree, batch=2, side=2)
    assert cost.shown_copies(one, tuple(range(degree))) == pytest.approx(waits)
    assert cost.shown_copies(two, tuple(range(2 * degree))) == pytest.approx(waits)
    longer = wait(clip, 2 * forward, backward, 0.0) - cost.table.gathering.exposed(clip, 2 * forward, backward)
    assert 0.0 < longer <= waits
    assert (longer < waits) == (waits > 1.0) == (layer > 10**5), "all of a small layer is hidden"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_an_encoder_whose_weights_are_divided_takes_just_the_ranks_that_divide_them(ranks: int) -> None:
    encode = cascade(Phase.ENCODE, batch=5)
    for world in (1, 2, 3, 4, 7, 8):
        legal = legal_degrees(encode, stage(tensor_parallel=ranks), parse_cluster(f"1x{world}:h100-80g"))
        if ranks == 1:
            assert legal == tuple(range(1, 6))[:world]
        else:
            assert legal == ((ranks,) if ranks <= world else ())


def test_groups_within_nodes_that_are_alike_cost_alike_and_across_nodes_or_on_slower_devices_more() -> None:
    plain, clip = model(stage()).table, cascade()
    packed = plain.entry(clip, 4)
    for ranks in ((0, 1, 2, 3), (4, 5, 6, 7), (8, 11, 13, 15), (3, 2, 1, 0)):
        assert plain.entry(clip, 4, ranks) == packed
    assert plain.entry(clip, 4, (0, 1, 8, 9)).time > packed.time
    mixed = model(stage(), cluster="1x4:h100-80g+2x4:a100-80g").table
    slow = [mixed.entry(clip, 4, ranks).time for ranks in ((4, 5, 6, 7), (8, 9, 10, 11), (11, 10, 9, 8))]
    assert len({*slow}) == 1
    assert mixed.entry(clip, 4, (0, 1, 2, 3)).time == mixed.entry(clip, 4, (3, 1, 0, 2)).time < slow[0]


def test_where_no_number_of_clips_may_lie_side_by_side_they_lie_behind_each_other() -> None:
    own = stage(cell=2, degrees=(3,))
    assert sides(cascade(batch=4), own, 4) == ()
    entry = model(own).table.entry(cascade(batch=4), 4)
    assert entry.strategy.side == 1
    assert entry.time == model(own).time(cascade(batch=4), 4, side=1)


def test_no_grid_is_cheaper_however_much_is_sent() -> None:
    """Twelve heads on eight ranks: one all-to-all leaves heads idle, a ring passes more."""
    chosen = set()
    for step in range(0, 60, 4):
        sent = formula("GiB", (1e-5 * 1.15**step, BS))
        cost = model(stage(traffic=sent, backward=formula("ms", (1e-7, BS2), (1e-3, BS))))
        best = cost.best_attention(cascade(), 8)
        times = [cost.time(cascade(), 8, ulysses=ulysses, ring=8 // ulysses) for ulysses in (8, 4, 2, 1)]
        assert cost.time(cascade(), 8, ulysses=best.ulysses, ring=best.ring) == min(times)
        chosen.add(best)
    assert len(chosen) > 1
