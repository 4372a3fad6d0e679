"""What activities share while they run: links, and the cores of a node.

An activity is a transfer, a cascade or a sum of gradients. It takes time of its own, time on cores, and time on sets of
links, one set after another; the busiest link of a set makes its pace. A link gives its users equal parts. A transfer
uses its links all the time; a cascade uses them for the part of its time that is communication, and to the others it
counts as that part of a user. For users that never pause this is fair sharing; for others it is mean-value analysis of
a shared server (Schweitzer's approximation, 1979).

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
Load = dict[LinkName, float]  # ms that an activity needs each link for when nobody else does


@dataclass(frozen=True)
class Work:
    """What an activity takes when it is alone, ms.

    ``computing`` counts its busy ranks by node, each of which wants one core for ``compute`` ms. ``loads`` follow one
    another.
    """

    fixed: float = 0.0
    compute: float = 0.0
    computing: tuple[tuple[int, int], ...] = ()
    loads: tuple[Load, ...] = ()

    @property
    def shares(self) -> bool:
        """Whether others can slow it down."""
        return bool(self.loads or self.computing)

    @property
    def alone(self) -> float:
        return self.fixed + self.compute + sum(max(load.values(), default=0.0) for load in self.loads)


@dataclass
class Activity:
    """Work under way. ``end`` holds as long as nobody else starts or ends; ``version`` counts the changes."""

    work: Work
    what: object
    left: float = 1.0  # of the work
    since: float = 0.0  # ms, when ``left`` was true
    takes: float = 0.0  # ms for the whole work at the present rate
    version: int = 0
    computes: float = 0.0  # part of its time that it is on cores
    uses: list[float] = field(default_factory=list)  # part of its time that it is on each of ``work.loads``

    @property
    def end(self) -> float:
        return self.since + self.left * self.takes


@dataclass
class Network:
    """The activities under way. ``start`` and ``finish`` return those whose end has moved.

    ``cores`` are those of a node; None where every rank has one of its own.
    """

    cores: float | None = None
    _on: dict[LinkName, dict[int, Activity]] = field(default_factory=lambda: defaultdict(dict))
    _used: dict[LinkName, float] = field(default_factory=lambda: defaultdict(float))
    _computing: dict[int, dict[int, Activity]] = field(default_factory=lambda: defaultdict(dict))
    _wanted: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # cores, by node

    def start(self, activity: Activity, now: float) -> list[Activity]:
        activity.since = now
        activity.uses = [0.0] * len(activity.work.loads)
        number = id(activity)
        for load in activity.work.loads:
            for link in load:
                self._on[link][number] = activity
        if self.cores is not None:
            for node, _ in activity.work.computing:
                self._computing[node][number] = activity
        self._pace(activity, now)
        others = self._neighbours(activity)
        for other in others:
            self._pace(other, now)
        if others:
            self._pace(activity, now)
        return [activity, *others]

    def finish(self, activity: Activity, now: float) -> list[Activity]:
        number = id(activity)
        others = self._neighbours(activity)
        for load, use in zip(activity.work.loads, activity.uses, strict=True):
            for link in load:
                del self._on[link][number]
                self._used[link] -= use
                if not self._on[link]:
                    del self._on[link], self._used[link]
        if self.cores is not None:
            for node, ranks in activity.work.computing:
                del self._computing[node][number]
                self._wanted[node] -= ranks * activity.computes
                if not self._computing[node]:
                    del self._computing[node], self._wanted[node]
        for other in others:
            self._pace(other, now)
        return others

    def _neighbours(self, activity: Activity) -> list[Activity]:
        """Everything else on its links and cores, in the order it is found in."""
        found: dict[int, Activity] = {}
        for load in activity.work.loads:
            for link in load:
                if len(self._on[link]) > 1:
                    found.update(self._on[link])
        if self.cores is not None:
            for node, _ in activity.work.computing:
                found.update(self._computing[node])
        found.pop(id(activity), None)
        return list(found.values())

    def _pace(self, activity: Activity, now: float) -> None:
        """How long the whole activity takes as things stand; what it has done so far was at the old pace."""
        if activity.takes > 0:
            activity.left = max(0.0, activity.left - (now - activity.since) / activity.takes)
        activity.since = now
        activity.version += 1
        work = activity.work
        computing = work.compute * self._crowding(activity)
        sending = [
            max((ms * (1.0 + self._used[link] - use) for link, ms in load.items()), default=0.0)
            for load, use in zip(work.loads, activity.uses, strict=True)
        ]
        activity.takes = takes = work.fixed + computing + sum(sending)
        if takes <= 0:
            return
        for place, (load, ms) in enumerate(zip(work.loads, sending, strict=True)):
            change = ms / takes - activity.uses[place]
            activity.uses[place] += change
            for link in load:
                self._used[link] += change
        if self.cores is not None:
            change = computing / takes - activity.computes
            activity.computes += change
            for node, ranks in work.computing:
                self._wanted[node] += ranks * change

    def _crowding(self, activity: Activity) -> float:
        """By how much its computing is slower than with a core for every rank: equal parts of the node's cores."""
        if self.cores is None:
            return 1.0
        worst = 1.0
        for node, ranks in activity.work.computing:
            others = self._wanted[node] - ranks * activity.computes
            worst = max(worst, (ranks + others) / self.cores)
        return worst


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
