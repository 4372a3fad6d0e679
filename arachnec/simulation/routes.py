"""Routes. In: two ranks of a cluster. Out: the links that a transfer between them takes.

Within a node these are the devices' ports, and the host's memory where devices have no links of their own. Between
nodes they are the NICs, each shared by the devices of one letter; between racks also the uplinks, each shared by its
rack. What encoders hand over travels from host to host: where the speed of the hosts' network is known it takes that,
one link a node, and nothing of the devices'. Links are full duplex: the two directions do not share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from arachnec.cluster.topology import host_link_of, host_of, intra_of, nic_of, node_of, rack_of, uplink_of
from arachnec.ir.nodes import Cluster, quantity
from arachnec.simulation.network import LinkName


@dataclass(frozen=True)
class Route:
    """The links that a transfer takes, with their capacities in bytes per ms, and the latency in ms."""

    links: tuple[LinkName, ...]
    capacities: tuple[float, ...]
    latency: float


def route(cluster: Cluster, source: int, target: int) -> Route:
    """From one rank's device to another's."""
    attrs = cluster.attrs
    if node_of(cluster, source) == node_of(cluster, target):
        speed = intra_of(cluster, source) * 1e6
        links: tuple[LinkName, ...] = (("port out", source), ("port in", target))
        capacities: tuple[float, ...] = (speed, speed)
        host = host_of(cluster, source) * 1e6
        if host < math.inf:
            links, capacities = (*links, ("host", node_of(cluster, source))), (*capacities, host)
        return Route(links, capacities, quantity(attrs["latency"]) / 1e3)
    speed = quantity(attrs["inter"]) * 1e6
    links = (
        ("nic out", node_of(cluster, source), nic_of(cluster, source)),
        ("nic in", node_of(cluster, target), nic_of(cluster, target)),
    )
    capacities = (speed, speed)
    if rack_of(cluster, source) != rack_of(cluster, target):
        links += (("up", rack_of(cluster, source)), ("down", rack_of(cluster, target)))
        capacities += (uplink_of(cluster) * 1e6,) * 2
    return Route(links, capacities, quantity(attrs["inter_latency"]) / 1e3)


def handoff_route(cluster: Cluster, source: int, target: int) -> Route:
    """From one rank's host to another's; that of their devices where the hosts' network was not measured."""
    speed = host_link_of(cluster)
    if speed is None:
        return route(cluster, source, target)
    here, there = node_of(cluster, source), node_of(cluster, target)
    latency = quantity(cluster.attrs["latency" if here == there else "inter_latency"]) / 1e3
    return Route((("host link out", here), ("host link in", there)), (speed * 1e6,) * 2, latency)
