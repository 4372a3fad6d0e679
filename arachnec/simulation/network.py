"""Contention: what activities that run at one time share, links and the cores of a node.

An activity is a transfer, a cascade or an all-reduce. It needs fixed time, time on cores, and time on sets of links,
one set after another. The busiest link of a set is its bottleneck. A link gives its users equal shares; what a user
cannot take, because its bottleneck is another link, goes to the others (max-min fairness).

A transfer uses its links all the time. A cascade uses them for the share of its time that is communication, and counts
as that share of a user. For users that never pause this is fair sharing. For others it is mean-value analysis of a
shared server (Schweitzer's approximation, 1979).

A transfer takes, within a node, the devices' ports, and the host's memory where devices have no links of their own;
between nodes the NICs, each shared by the devices of one letter; between racks also the uplinks, each shared by its
rack. What encoders hand over travels from host to host: where the speed of the hosts' network is known it takes that,
one link a node, and nothing of the devices'. Links are full duplex: the two directions do not share.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from arachnec.cluster.topology import host_link_of, host_of, intra_of, nic_of, node_of, rack_of, uplink_of
from arachnec.ir.nodes import Cluster, quantity

LinkName = Hashable
Load = tuple[tuple[float, tuple[LinkName, ...]], ...]  # ms for which each of some links is needed, (ms, links) by ms

LEAST_CHANGE = 1e-3  # in the users of a link, below which the others on it keep their pace
LEAST_CHANGE_PER_USER = 2e-3  # the same, on a link of many users
SWEEPS = 8  # pace and use of activities depend on each other; the fixed point is near
BRAKING = 32  # sweeps more, in which activities only slow down, where paces go round in a circle
ROUNDING = 1e-9  # users of a link that count as none; relative change of a time that counts as none
BOTTLENECK = 0.999  # share of an activity's time above which a link is its bottleneck


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
        return self.fixed + self.compute + sum(max(ms for ms, _ in load) for load in self.loads)


Throttled = tuple[float, float]  # users of a link whose bottleneck is another link, and the share of it that they take
NONE: Throttled = (0.0, 0.0)


@dataclass(eq=False)
class Activity:
    """Work under way. ``end`` holds until another activity starts or ends; ``version`` counts the changes."""

    work: Work
    subject: object  # for whoever started it
    since: float  # ms, when ``remaining`` was true
    remaining: float = 1.0  # share of the work
    takes: float = 0.0  # ms for all of the work at the present pace
    version: int = 0
    computes: float = 0.0  # share of its time that it is on cores
    uses: list[float] = field(default_factory=list)  # share of its time that it is on each of ``work.loads``
    throttled: dict[LinkName, Throttled] = field(default_factory=dict)  # on links that are not its bottleneck

    @property
    def end(self) -> float:
        return self.since + self.remaining * self.takes


@dataclass
class Network:
    """The activities under way. ``settle``, after all starts and ends of one time, returns those whose end has moved.

    ``cores`` are those of a node; None where computation shares nothing.
    """

    cores: float | None = None
    _on: dict[LinkName, dict[Activity, None]] = field(default_factory=lambda: defaultdict(dict))
    _used: dict[LinkName, float] = field(default_factory=lambda: defaultdict(float))  # number of users, or busy cores
    _throttled: dict[LinkName, Throttled] = field(default_factory=dict)  # those of ``_used`` with other bottlenecks
    _settled: dict[LinkName, tuple[float, Throttled]] = field(default_factory=dict)  # both, when its users were paced
    _changed: dict[LinkName, float] = field(default_factory=lambda: defaultdict(float))  # sum of absolute changes
    _started: dict[Activity, None] = field(default_factory=dict)
    _ended: bool = False  # whether an activity has ended since the last ``settle``

    def start(self, activity: Activity) -> None:
        work = activity.work
        activity.takes = work.alone
        activity.uses = [0.0] * len(work.loads)
        for link in self._links(work):
            self._on[link][activity] = None
        self._use(activity, [max(ms for ms, _ in load) for load in work.loads], work.compute)
        self._started[activity] = None

    def finish(self, activity: Activity) -> None:
        self._ended = True
        self._started.pop(activity, None)
        self._use(activity, [0.0] * len(activity.uses), 0.0)
        self._throttle(activity, {})
        for link in self._links(activity.work):
            del self._on[link][activity]

    def settle(self, now: float) -> list[Activity]:
        """Give every activity the pace that its links and cores allow; returns those that started or changed."""
        if not (self._started or self._ended):
            return []  # what has not converged in SWEEPS may never do
        unpaced: dict[Activity, None] = dict(self._started)
        moved: dict[Activity, None] = dict(unpaced)
        self._started.clear()
        self._ended = False
        for sweep in range(SWEEPS + BRAKING):
            for link in self._unsettled(within=sweep > 0):
                unpaced.update(self._on[link])
            if not unpaced:
                return list(moved)
            for activity in unpaced:
                if self._pace(activity, now, braking=sweep >= SWEEPS):
                    moved[activity] = None
            unpaced = {}
        for link in self._changed:  # not converged: paced anew by the next ``settle`` that touches them
            self._settled.pop(link, None)
        return list(moved)

    def _unsettled(self, *, within: bool) -> list[LinkName]:
        """The links whose users have to be paced anew; they then count as settled.

        Before the first sweep only the net change of a link counts: an end and a start may cancel out. ``within`` the
        sweeps users are paced one after another, some by a state of the link in between.
        """
        changed, self._changed = self._changed, defaultdict(float)
        links: list[LinkName] = []
        for link, change in changed.items():
            if not self._on[link]:
                del self._on[link], self._used[link]
                self._settled.pop(link, None)
                continue
            used, (users, share) = self._settled.get(link, (0.0, NONE))
            now, throttled = self._used[link], self._throttled.get(link, NONE)
            net = max(abs(now - used), abs(throttled[0] - users), abs(throttled[1] - share))
            if max(net, change if within else 0.0) > max(LEAST_CHANGE, LEAST_CHANGE_PER_USER * now):
                self._settled[link] = now, throttled
                links.append(link)
        return links

    def _links(self, work: Work) -> Iterator[LinkName]:
        for load in work.loads:
            for _, links in load:
                yield from links
        if self.cores is not None:
            for node, _ in work.computing:
                yield "cores", node

    def _pace(self, activity: Activity, now: float, *, braking: bool) -> bool:
        """Set how long the activity takes at the present load; returns whether that has changed.

        While ``braking`` one that could be faster stays as it is.
        """
        work = activity.work
        computing = work.compute * self._core_slowdown(activity)
        sending = [
            max(self._sending(activity, ms, links, use) for ms, links in load)
            for load, use in zip(work.loads, activity.uses, strict=True)
        ]
        takes = work.fixed + computing + sum(sending)
        if braking and takes < activity.takes:
            return False
        changed = abs(takes - activity.takes) > ROUNDING * takes
        if changed:
            if activity.takes > 0:  # its progress so far was at the old pace
                activity.remaining = max(0.0, activity.remaining - (now - activity.since) / activity.takes)
            activity.since = now
            activity.version += 1
            activity.takes = takes
        self._use(activity, sending, computing)
        self._throttle(activity, self._throttled_links(activity, sending))
        return changed

    def _sending(self, activity: Activity, ms: float, links: tuple[LinkName, ...], use: float) -> float:
        """ms for communication that takes ``ms`` alone; the activity itself is ``use`` of the links' users."""
        if self._throttled.keys().isdisjoint(links):
            return ms * (1.0 - use + max(map(self._used.__getitem__, links)))
        return ms * max(self._slowness(activity, link, use) for link in links)

    def _slowness(self, activity: Activity, link: LinkName, use: float) -> float:
        """The number of equal shares of the link, of which the activity gets one."""
        users = 1.0 - use + self._used[link]
        if link not in self._throttled:
            return users
        (throttled, taken), (own, own_taken) = self._throttled[link], activity.throttled.get(link, NONE)
        capacity, competing = 1.0 - taken + own_taken, users - throttled + own
        return users if capacity * users <= competing else competing / capacity

    def _throttled_links(self, activity: Activity, sending: list[float]) -> dict[LinkName, Throttled]:
        """What the activity takes of the links that it shares and that are not its bottleneck."""
        throttled: dict[LinkName, Throttled] = {}
        for load, total, use in zip(activity.work.loads, sending, activity.uses, strict=True):
            for ms, links in load:
                for link in links:
                    if len(self._on[link]) > 1 and ms * self._slowness(activity, link, use) < BOTTLENECK * total:
                        throttled[link] = use, use * ms / total
        return throttled

    def _throttle(self, activity: Activity, throttled: dict[LinkName, Throttled]) -> None:
        """Record what the activity takes of links that are not its bottleneck."""
        for link in {**activity.throttled, **throttled}:
            (users, share), (before, taken) = throttled.get(link, NONE), activity.throttled.get(link, NONE)
            if users == before and share == taken:
                continue
            self._changed[link] += max(abs(users - before), abs(share - taken))
            others, other_share = self._throttled.get(link, NONE)
            if others + users - before > ROUNDING:
                self._throttled[link] = others + users - before, other_share + share - taken
            else:
                self._throttled.pop(link, None)
        activity.throttled = throttled

    def _core_slowdown(self, activity: Activity) -> float:
        """How much slower it computes than with one core per rank: ranks get equal shares of the node's cores."""
        if self.cores is None:
            return 1.0
        wanted = (
            ranks * (1.0 - activity.computes) + self._used["cores", node] for node, ranks in activity.work.computing
        )
        return max(1.0, max(wanted, default=0.0) / self.cores)

    def _use(self, activity: Activity, sending: list[float], computing: float) -> None:
        """Record the shares of its time that the activity is on its links and cores."""
        total = activity.takes if activity.takes > 0 else 1.0
        for place, (load, ms) in enumerate(zip(activity.work.loads, sending, strict=True)):
            change = ms / total - activity.uses[place]
            if change:
                activity.uses[place] += change
                for _, links in load:
                    for link in links:
                        self._used[link] += change
                        self._changed[link] += abs(change)
        change = computing / total - activity.computes
        if change and self.cores is not None:
            activity.computes += change
            for node, ranks in activity.work.computing:
                self._used["cores", node] += ranks * change
                self._changed["cores", node] += ranks * abs(change)


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
