"""Devices without links of their own: what a node's devices send each other shares the host's PCIe."""

import math
from pathlib import Path

import pytest

from arachnec.cluster.device_specs import DEVICE_SPECS
from arachnec.cluster.file import parse_cluster
from arachnec.cluster.topology import group_link, handoff_time, host_of, ring_link, ulysses_link
from arachnec.ir.diagnostic import UserError, render
from arachnec.ir.nodes import quantity
from arachnec.simulation.network import route


def test_an_all_to_all_goes_through_the_host_whole() -> None:
    cluster = parse_cluster("2x4:l20")
    assert ulysses_link(cluster, (0, 1), 2).hosted == pytest.approx(1.0), "two ranks send half of their bytes each"
    assert ulysses_link(cluster, (0, 1, 2, 3), 4).hosted == pytest.approx(3.0)
    assert ulysses_link(cluster, (0, 1, 2, 3), 2).hosted == pytest.approx(2.0), "two groups at once"
    assert ulysses_link(cluster, (0, 4), 2).hosted == 0, "on two nodes nothing stays inside"


def test_a_ring_goes_through_it_once_for_every_hop_inside() -> None:
    cluster = parse_cluster("2x4:l20")
    assert ring_link(cluster, (0, 1, 2, 3), 1).hosted == 4
    assert ring_link(cluster, (0, 1, 4, 5), 1).hosted == 1
    assert group_link(cluster, (0, 1, 2, 3)).hosted == pytest.approx(3.0)
    assert group_link(cluster, (0, 1, 4, 5)).hosted == pytest.approx(0.75)


def test_devices_with_links_of_their_own_share_none() -> None:
    assert group_link(parse_cluster("1x8:h100"), tuple(range(8))).host == math.inf
    assert host_of(parse_cluster("4:cpu"), 0) == math.inf
    mixed = parse_cluster("1x4:h100+1x4:l20")
    assert [host_of(mixed, rank) for rank in (0, 4)] == [math.inf, DEVICE_SPECS["l20-48g"].host]


def test_transfers_of_a_node_share_its_host(tmp_path: Path) -> None:
    cluster = parse_cluster("2x4:l20")
    assert set(route(cluster, 0, 1).links) & set(route(cluster, 2, 3).links) == {("host", 0)}
    assert not set(route(cluster, 0, 1).links) & set(route(cluster, 4, 5).links)
    file = tmp_path / "c.toml"
    file.write_text('gpus = 2\ndevice = "h100"\nhost = "5 GB/s"\n')
    narrow = parse_cluster(file)
    assert quantity(narrow.attrs["host"]) == 5
    assert handoff_time(narrow, 0, 1, 5e9) == pytest.approx(1000, rel=1e-3)


def test_a_host_is_a_speed_and_in_mixed_nodes_that_of_the_device(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    for text, expected in (
        ('gpus = 2\ndevice = "l20"\nhost = 5\n', "with its unit"),
        ('gpus = 2\nhost = "5 GB/s"\n[[group]]\ndevice = "l20"\n', "`host` of the cluster"),
    ):
        file.write_text(text)
        with pytest.raises(UserError) as caught:
            parse_cluster(file)
        assert [expected in render(problem) for problem in caught.value.diagnostics] == [True]
