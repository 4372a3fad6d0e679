"""Transfers that share links: every link gives its transfers equal parts, the scarcest part is a transfer's rate.

Within a node a device's own port is the link, between nodes the NIC that the device sits on, which it shares with the
devices of the same letter, and between racks the uplinks too, which a whole rack shares; both directions are apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field

from arachnec.ir.nodes import Cluster, quantity
from arachnec.passes.topology import nic_of, node_of, rack_of, uplink_of

LinkName = Hashable


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
        speed = quantity(attrs["intra"]) * 1e6
        links: tuple[LinkName, ...] = (("port out", source), ("port in", target))
        return Route(links, (speed, speed), quantity(attrs["latency"]) / 1e3)
    speed = quantity(attrs["inter"]) * 1e6
    links = (
        ("nic out", node_of(cluster, source), nic_of(cluster, source)),
        ("nic in", node_of(cluster, target), nic_of(cluster, target)),
    )
    capacities: tuple[float, ...] = (speed, speed)
    if rack_of(cluster, source) != rack_of(cluster, target):
        links += (("up", rack_of(cluster, source)), ("down", rack_of(cluster, target)))
        capacities += (uplink_of(cluster) * 1e6,) * 2
    return Route(links, capacities, quantity(attrs["inter_latency"]) / 1e3)


@dataclass
class Flow:
    """A transfer under way."""

    route: Route
    left: float  # bytes
    rate: float = 0.0  # bytes / ms
    since: float = 0.0  # ms, when ``left`` was true
    version: int = 0  # counts the changes of rate


@dataclass
class Network:
    """The flows that are under way. ``start`` and ``finish`` return those whose end has moved."""

    _on: dict[LinkName, list[Flow]] = field(default_factory=lambda: defaultdict(list))

    def start(self, flow: Flow, now: float) -> list[Flow]:
        flow.since = now
        for link in flow.route.links:
            self._on[link].append(flow)
        return self._share(flow.route, now)

    def finish(self, flow: Flow, now: float) -> list[Flow]:
        for link in flow.route.links:
            self._on[link].remove(flow)
        return self._share(flow.route, now)

    def _share(self, changed: Route, now: float) -> list[Flow]:
        touched = {id(flow): flow for link in changed.links for flow in self._on[link]}
        for flow in touched.values():
            flow.left = max(0.0, flow.left - flow.rate * (now - flow.since))
            flow.since = now
            flow.rate = min(
                capacity / len(self._on[link])
                for link, capacity in zip(flow.route.links, flow.route.capacities, strict=True)
            )
            flow.version += 1
        return list(touched.values())
