"""Two-tier fabrics: what an uplink that a whole rack shares costs, and that placement keeps off it."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from arachnec.cluster.file import parse_cluster
from arachnec.cluster.topology import group_link, handoff_time, rack_of, ring_link, topology, ulysses_link, uplink_of
from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import UserError, render
from arachnec.ir.nodes import Cascade, Cluster, Level, Module, Phase, Stage
from arachnec.ir.values import Attributes, Formula, Quantity, Term
from arachnec.ir.verify import verify
from arachnec.planning.cascade_ranks import pick_ranks
from arachnec.simulation.network import route


def racks(nodes: int = 4, gpus: int = 1, rack: int = 2, uplink: float = 1.0) -> Cluster:
    flat = parse_cluster(f"{nodes}x{gpus}:h100-80g")
    attrs = flat.attrs.updated(rack=rack, uplink=Quantity(uplink, "GB/s"), inter=Quantity(4.0, "GB/s"), nics=None)
    return replace(flat, attrs=attrs)


def model(cluster: Cluster) -> CostModel:
    traffic = Formula((Term(1e-4, (("B", 1), ("S", 1))),), "GiB")
    forward = Formula((Term(1e-2, (("B", 1), ("S", 1))),), "ms")
    attrs = Attributes.of(heads=8, attentions=10, traffic=traffic, forward=forward)
    return CostModel(Module("m", Level.COSTED, cluster, stages=(Stage("dit", False, attrs),)))


CASCADE = Cascade("0", Phase.FORWARD, "dit", (0,), 1, 10_000, 100)


def test_nodes_follow_one_another_in_racks_and_the_last_rack_may_be_smaller() -> None:
    cluster = racks(nodes=5, gpus=2, rack=2)
    assert [rack_of(cluster, rank) for rank in range(10)] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert {rack_of(parse_cluster("4x2:cpu"), rank) for rank in range(8)} == {0}
    assert uplink_of(parse_cluster("4x2:cpu")) == math.inf


def test_an_all_to_all_sends_over_an_uplink_what_its_other_half_wants() -> None:
    cluster = racks()
    assert ulysses_link(cluster, (0, 1), 2).shared == 0, "both in one rack"
    assert ulysses_link(cluster, (1, 2), 2).shared == pytest.approx(0.5), "one rank sends half of its bytes"
    assert ulysses_link(cluster, (0, 1, 2, 3), 4).shared == pytest.approx(1.0), "two ranks send half of theirs each"
    assert ulysses_link(cluster, (0, 2, 1, 3), 2).shared == pytest.approx(1.0), "two groups at once"


def test_a_ring_crosses_an_uplink_once_however_many_ranks_it_has() -> None:
    cluster = racks(gpus=4)
    everyone = tuple(range(16))
    assert group_link(cluster, everyone).shared == pytest.approx(15 / 16)
    assert group_link(cluster, tuple(range(8))).shared == 0
    assert ring_link(cluster, everyone, 1).shared == 1
    assert ring_link(cluster, everyone, 4).shared == 4, "four rings, each with one hop out of either rack"
    assert ring_link(cluster, (0, 8), 1).shared == 1, "there and back are apart"


def test_the_same_cascade_is_slower_across_racks_by_what_the_uplink_lacks() -> None:
    cost = model(racks(uplink=1.0))
    inside, across = (cost.time(CASCADE, 2, ranks=ranks, ulysses=2) for ranks in ((0, 1), (1, 2)))
    assert across > inside
    wide = model(racks(uplink=1e6))
    assert wide.time(CASCADE, 2, ranks=(1, 2), ulysses=2) == pytest.approx(inside), "an uplink that is never full"


def test_over_a_narrow_uplink_a_ring_replaces_the_all_to_all() -> None:
    cost = model(racks(gpus=4, nodes=2, rack=1, uplink=0.01))
    assert cost.best_attention(CASCADE, 8, tuple(range(8))).ring == 2


def test_a_cascade_of_several_nodes_is_placed_in_one_rack_where_one_has_room() -> None:
    cluster = racks(nodes=8, gpus=2, rack=4)
    assert pick_ranks(cluster, [4, 5, 6, *range(8, 16)], 4, set()) == (8, 9, 10, 11), "rank 6 has lost its neighbour"
    assert pick_ranks(cluster, [2, 3, 6, 7, 8, 9], 4, set()) == (2, 3, 6, 7)
    assert pick_ranks(cluster, [6, 7, 8, 9, 10, 11], 4, set()) == (8, 9, 10, 11), "the first four are in two racks"
    assert pick_ranks(cluster, [0, 2, 8, 10], 2, {8}) == (8, 10)
    assert pick_ranks(cluster, [0, 8], 1, {9}) == (8,), "a node of the rack that holds the inputs"


def test_a_group_too_large_for_any_rack_takes_most_of_one() -> None:
    cluster = racks(nodes=4, gpus=2, rack=2)
    assert pick_ranks(cluster, [1, 2, 3, 4, 5, 6, 7], 5, set()) == (2, 4, 5, 6, 7)


def test_transfers_between_racks_go_over_both_uplinks_and_those_inside_over_none() -> None:
    cluster = racks()
    between = route(cluster, 0, 2)
    speeds = dict(zip(between.links, between.capacities, strict=True))
    assert (speeds["up", 0], speeds["down", 1]) == (1e6, 1e6), "bytes per ms of 1 GB/s"
    assert set(route(cluster, 1, 3).links) & set(between.links) == {("up", 0), ("down", 1)}
    assert {name for name, *_ in route(cluster, 2, 3).links} == {"nic out", "nic in"}
    assert handoff_time(cluster, 0, 2, 1e9) > handoff_time(cluster, 0, 1, 1e9)


def test_the_topology_has_a_vertex_for_every_rack() -> None:
    graph = topology(racks())
    assert graph.edges[("rack", 1), ("fabric",)]["bandwidth"] == 1.0
    assert ("rack", 0) not in topology(parse_cluster("4x1:h100-80g")).nodes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rack = 2\n", "has no `uplink`"),
        ('uplink = "10 GB/s"\n', "has no `rack`"),
        ('rack = 0\nuplink = "10 GB/s"\n', "nodes: 1 to 1e+15"),
        ('rack = 2\nuplink = "10 us"\n', "with its unit"),
    ],
)
def test_a_rack_needs_its_uplink_and_the_other_way_round(text: str, expected: str, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f'nodes = 4\ngpus = 1\ndevice = "cpu"\n{text}')
    with pytest.raises(UserError) as caught:
        parse_cluster(file)
    assert [expected in render(problem) for problem in caught.value.diagnostics] == [True]


def test_a_rack_of_nothing_is_refused_by_the_verifier_too() -> None:
    cluster = racks()
    broken = replace(cluster, attrs=cluster.attrs.updated(rack=0))
    module = Module("m", Level.TRACED, broken)
    assert ["rack = 0" in render(problem) for problem in verify(module)] == [True]
