"""Time, memory and the choice of attention, by the rules that the cost model states."""

import math
from dataclasses import replace

import pytest

from arachnec.cluster.file import parse_cluster
from arachnec.cluster.topology import nic_of, numa_of, packed_ranks, penalty, topology, with_slowdowns
from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Cascade, Level, Module, Phase, Stage
from arachnec.ir.values import Attributes, Formula, Quantity, Term

BS2, BS, BT = (("B", 1), ("S", 2)), (("B", 1), ("S", 1)), (("B", 1), ("T", 1))


def formula(unit: str, *terms: tuple[float, tuple[tuple[str, int], ...]]) -> Formula:
    return Formula(tuple(Term(value, powers) for value, powers in terms), unit)


def stage(**changed: object) -> Stage:
    values: dict[str, object] = {
        "heads": 12,
        "attentions": 30,
        "forward": formula("ms", (1e-6, BS2), (1e-2, BS), (1e-3, BT), (3.0, ())),
        "backward": formula("ms", (2e-6, BS2), (2e-2, BS), (2e-3, BT), (6.0, ())),
        "traffic": formula("GiB", (3e-4, BS)),
        "saved": formula("GiB", (1e-3, BS)),
        "saved_recompute": formula("GiB", (1e-4, BS)),
        "workspace": formula("GiB", (1e-5, BS), (0.5, ())),
        "state": Quantity(10.0, "GiB"),
    }
    return Stage("dit", True, Attributes.of(**{**values, **changed}))  # type: ignore[arg-type]


def cascade(tokens: int = 24_000, phase: Phase = Phase.TRAIN, **attrs: object) -> Cascade:
    return Cascade("0", phase, "dit", (0,), 1, tokens, 100, attrs=Attributes.of(**attrs))  # type: ignore[arg-type]


def model(cluster: str = "2x8:h100-80g", **changed: object) -> CostModel:
    one = cascade()
    return CostModel(Module("m", Level.COSTED, parse_cluster(cluster), stages=(stage(**changed),), cascades=(one,)))


def test_at_degree_one_the_time_is_the_formulas() -> None:
    expected = 3 * (1e-6 * 24_000**2 + 1e-2 * 24_000 + 1e-3 * 100 + 3.0)
    assert model().time(cascade(), 1) == pytest.approx(expected)


def test_recomputation_costs_one_more_forward() -> None:
    cost = model()
    forward = 1e-6 * 24_000**2 + 1e-2 * 24_000 + 1e-3 * 100 + 3.0
    assert cost.time(cascade(), 1, recompute=True) - cost.time(cascade(), 1) == pytest.approx(forward)


def test_what_no_size_of_the_clip_scales_is_not_divided_by_the_degree() -> None:
    cost = model(traffic=None)
    fixed = 3 * (3.0 + 1e-3 * 100)
    divided = 3 * (1e-6 * 24_000**2 + 1e-2 * 24_000)
    latency = cost.time(cascade(), 4, ulysses=4) - (fixed + divided / 4)
    assert 0 < latency < 5, "what is left is the latency of the collectives"


def test_uneven_heads_wait_for_the_rank_with_the_most() -> None:
    cost = model(traffic=None, forward=formula("ms", (1e-6, BS2)), backward=formula("ms", (2e-6, BS2)))
    even, uneven = cost.time(cascade(), 4, ulysses=4), cost.time(cascade(), 5, ulysses=5)
    whole = cost.time(cascade(), 1)
    assert even == pytest.approx(whole * 3 / 12, rel=1e-2)
    assert uneven == pytest.approx(whole * math.ceil(12 / 5) / 12, rel=1e-2)


def test_uneven_tokens_wait_for_the_rank_with_the_most() -> None:
    cost = model(attentions=0, forward=formula("ms", (1.0, BS)), backward=formula("ms", (2.0, BS)))
    assert cost.time(cascade(tokens=10), 4) == pytest.approx(3 * 3.0)


def test_a_group_over_two_nodes_is_slower_than_one_within_a_node() -> None:
    cost = model()
    assert cost.time(cascade(), 4, spans_nodes=2) > cost.time(cascade(), 4)
    assert cost.time(cascade(), 4, spans_nodes=1) == cost.time(cascade(), 4)
    assert cost.time(cascade(), 4, ranks=(6, 7, 8, 9)) > cost.time(cascade(), 4, ranks=(8, 9, 10, 11))


def test_ulysses_times_ring_is_the_degree_and_no_rank_is_without_a_head() -> None:
    cost = model("4x8:h100-80g")
    for degree in cost.legal_degrees(cascade()):
        split = cost.best_attention(cascade(), degree)
        assert split.ulysses * split.ring == degree
        assert split.ulysses <= 12


def test_a_grid_has_its_own_time_whatever_was_asked_for_before() -> None:
    cost = model("4x8:h100-80g")
    grids = [(8, 1), (4, 2), (2, 4), (1, 8)]
    cheapest = cost.time(cascade(), 8)
    times = [cost.time(cascade(), 8, ulysses=u, ring=r) for u, r in grids]
    assert len(set(times)) == len(grids)
    assert min(times) == cheapest
    assert [cost.time(cascade(), 8, ring=r) for _, r in grids] == times
    assert [cost.time(cascade(), 8, ulysses=u) for u, _ in reversed(grids)] == times[::-1]


def test_rows_of_one_shape_differ_by_what_their_inputs_hand_off() -> None:
    vae = Stage("vae", False, Attributes.of(output=formula("GiB", (1e-4, BS))))
    clips = [Cascade(name, Phase.ENCODE, "vae", (0,), 1, 24_000, 100) for name in ("a", "b")]
    one, both = (replace(cascade(), name=str(len(names)), inputs=names) for names in (("a",), ("a", "b")))
    module = Module("m", Level.COSTED, parse_cluster("8:h100-80g"), stages=(vae, stage()), cascades=(*clips, one, both))
    table = CostModel(module).table
    assert table.entry(both, 4).memory - table.entry(one, 4).memory == pytest.approx(2.4)
    assert table.entry(both, 4).time == table.entry(one, 4).time


def test_measured_times_stand_instead_of_formulas() -> None:
    cost = model()
    measured = cascade(times=((2, Quantity(70.0, "ms")), (4, Quantity(40.0, "ms")), (64, Quantity(9.0, "ms"))))
    assert cost.legal_degrees(measured) == (2, 4)
    assert cost.time(measured, 4, spans_nodes=2) == 40.0
    with pytest.raises(ValueError, match="not measured at degree 3"):
        cost.time(measured, 3)


def test_an_encoder_takes_its_clips_measured_time_for_each_that_the_busiest_rank_has() -> None:
    encode = replace(cascade(phase=Phase.ENCODE, per_clip=Quantity(20.0, "ms")), batch=5, clips=tuple(range(5)))
    cost = model()
    assert [cost.time(encode, degree) for degree in (1, 2, 3, 5)] == pytest.approx([100.0, 60.0, 40.0, 20.0], rel=0.01)
    assert cost.time(encode, 1) != cost.time(encode.with_attrs(per_clip=None), 1)


def test_a_rank_that_a_run_saw_slow_takes_so_many_times_what_it_was_planned_to() -> None:
    """All of it, so that a plan with the slowdown is what was measured, and the rank is not taken for slower still."""
    plain = model("1x4:h100-80g")
    slow = CostModel(
        Module("m", Level.COSTED, with_slowdowns(plain.cluster, {1: 5.0}), stages=(stage(),), cascades=(cascade(),))
    )
    for one in (cascade(), cascade(phase=Phase.FORWARD), cascade(phase=Phase.ENCODE), cascade(tokens=1)):
        assert slow.time(one, 1, ranks=(1,)) == pytest.approx(5 * plain.time(one, 1, ranks=(1,)))
        assert slow.time(one, 1, ranks=(0,)) == plain.time(one, 1, ranks=(0,))


def test_a_slower_device_takes_longer_for_measured_clips_too() -> None:
    encode = cascade(phase=Phase.ENCODE, per_clip=Quantity(20.0, "ms"))
    cost = model("1x4:h100-80g+1x4:a100-80g")
    fast, slow = cost.time(encode, 1, ranks=(0,)), cost.time(encode, 1, ranks=(4,))
    assert fast == pytest.approx(20.0)
    assert slow / fast == pytest.approx(cost.devices.slowdown((4,)))
    assert cost.least_compute(encode, 1, 2.0) == pytest.approx(40.0)


def test_memory_falls_with_the_degree_and_with_recomputation() -> None:
    cost = model()
    assert cost.memory(cascade(), 1) == pytest.approx(24.0 + 0.24 + 0.5)
    assert cost.memory(cascade(), 4) == pytest.approx(6.0 + 0.06 + 0.5)
    assert cost.memory(cascade(), 4, recompute=True) == pytest.approx(0.6 + 0.06 + 0.5)


def test_options_fit_the_memory_and_each_is_faster_than_every_smaller_degree() -> None:
    cost = model(saved=formula("GiB", (6e-3, BS)), saved_recompute=formula("GiB", (4e-3, BS)))
    options = cost.options(cascade())
    assert min(options) == 2
    assert list(options.values()) == sorted(options.values(), reverse=True)
    assert cost.recompute_at(cascade(), 2) == 1, "all: the stage does not say how many blocks it has"
    assert cost.recompute_at(cascade(), 8) == 0
    assert cost.recompute_at(cascade(), 1) is None


def test_penalties_between_nodes_are_those_arachne_measured() -> None:
    cluster = parse_cluster("2x8:h100-80g")
    assert penalty(cluster, (0, 1, 2, 3)) == 1.0
    assert penalty(cluster, (0, 1, 8, 9)) == pytest.approx(1.0482, abs=1e-4)
    assert penalty(cluster, (0, 2, 8, 12)) == pytest.approx(1.1009, abs=1e-4)
    assert penalty(cluster, (0, 1, 12, 13)) == pytest.approx(1.2114, abs=1e-4)


def test_the_topology_joins_every_rank_to_every_other() -> None:
    import networkx as nx

    cluster = parse_cluster("2x8:h100-80g")
    graph = topology(cluster)
    assert nx.is_connected(graph)
    assert nx.shortest_path(graph, ("rank", 0), ("rank", 7))[1] == ("switch", 0)
    assert ("fabric",) in nx.shortest_path(graph, ("rank", 0), ("rank", 8))
    assert [nic_of(cluster, rank) for rank in (0, 3, 15)] == ["A", "B", "D"]
    assert [numa_of(cluster, rank) for rank in (0, 3, 4, 15)] == [0, 0, 1, 1]


def test_packed_ranks_use_as_few_nodes_as_hold_them_or_as_many_as_asked() -> None:
    cluster = parse_cluster("2x8:h100-80g")
    assert packed_ranks(cluster, 3) == (0, 1, 2)
    assert packed_ranks(cluster, 3, 2) == (0, 1, 8)
    with pytest.raises(ValueError, match="cannot span"):
        packed_ranks(cluster, 12, 1)
