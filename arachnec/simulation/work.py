"""The work of an instruction: what it needs of shared cores and links. In: an instruction and its group. Out: ``Work``.

The plan states one time. Its communication, as the cost model counts it, is replaced by the bytes that cross each port,
NIC and uplink, given the ranks of the group: devices behind one NIC share it, and no other cascades are assumed. Within
a node the two are equal: an instruction that runs alone takes the planned time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from arachnec.cluster.device_specs import copy_speed, device_copy_speed, node_copy_speed
from arachnec.cluster.topology import has_gpus, host_of, intra_of, moves_by_cores, nic_of, node_of, rack_of, uplink_of
from arachnec.cost.communication import ring_passes
from arachnec.cost.gathering import measured_collective
from arachnec.cost.model import CostModel
from arachnec.cost.profile import HANDOFF, OVERLAPPED
from arachnec.cost.strategy import Attention
from arachnec.ir.nodes import Cascade, Cluster, Instruction, Module, Stage, integer, quantity
from arachnec.ir.parameter_cells import side_by_side
from arachnec.ir.stage_sizes import crowding
from arachnec.simulation.network import LinkName, Load, Route, Work, handoff_route, route

Needed = dict[LinkName, float]  # ms for which each link is needed


@dataclass(frozen=True)
class _Sent:
    """The communication of a cascade in ms: as planned, and as latency and loads on links."""

    planned: float = 0.0
    latency: float = 0.0
    loads: tuple[Load, ...] = ()


@dataclass
class Works:
    """The work of every instruction of a lowered module; computed once per group and shape."""

    module: Module
    cluster: Cluster
    _cost: CostModel = field(init=False)
    _cascades: dict[str, Cascade] = field(init=False)
    _routes: dict[tuple[int, int], Route] = field(default_factory=dict)
    _handoff_routes: dict[tuple[int, int], Route] = field(default_factory=dict)
    _sent: dict[str, _Sent] = field(default_factory=dict)
    _copies: dict[str, float] = field(default_factory=dict)
    _units: dict[tuple[int, ...], tuple[Needed, Needed]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._cost = CostModel(self.module)
        self._cascades = {cascade.name: cascade for cascade in self.module.cascades}

    @property
    def cores(self) -> float | None:
        """Of a node, counted in those of a rank; None for GPUs, which compute for one instruction at a time."""
        if has_gpus(self.cluster):
            return None
        return self.cluster.gpus / crowding(self.cluster)

    def route(self, source: int, target: int) -> Route:
        path = self._routes.get((source, target))
        if path is None:
            path = self._routes[source, target] = route(self.cluster, source, target)
        return path

    def handoff_route(self, source: int, target: int) -> Route:
        path = self._handoff_routes.get((source, target))
        if path is None:
            path = self._handoff_routes[source, target] = handoff_route(self.cluster, source, target)
        return path

    def transfer(self, source: int, target: int, size: int) -> Work:
        """Of a handoff, without its latency. Cores that compute send it and receive it: what that takes of them, where
        it was measured."""
        known = measured_collective(self.cluster, OVERLAPPED[HANDOFF])
        if known is not None and moves_by_cores(self.cluster, (source, target)):
            latency, speed = known
            return self._computing((source,), latency * 1e-3 + size / speed * 1e-6)
        path = self.handoff_route(source, target)
        return Work(
            loads=(_load({link: size / speed for link, speed in zip(path.links, path.capacities, strict=True)}),)
        )

    def of(self, instruction: Instruction, rank: int) -> Work:
        """Of an instruction that takes time on ``rank``, or on its group."""
        time = instruction.attrs.get("time")
        planned = 0.0 if time is None else quantity(time)
        group = instruction.peers or (rank,)
        if instruction.op in ("gather", "reduce"):
            return self._reduce(instruction, planned)
        cascade = self._cascades.get(instruction.target)
        if cascade is None:
            return self._computing(group, planned)
        shown = self._shown_copies(instruction, cascade, group, planned)
        alone = planned - shown
        work = self._computing(group, alone) if len(group) == 1 else self._cascade(cascade, group, alone)
        return replace(work, loads=(*work.loads, self._copied(group, shown))) if shown else work

    def _shown_copies(
        self, instruction: Instruction, cascade: Cascade, group: tuple[int, ...], planned: float
    ) -> float:
        """ms of the instruction's planned time in which its ranks wait for their hosts' memory."""
        duration = cascade.end - cascade.start
        if not {"from_host", "to_host"} & set(instruction.attrs) or self.cores is not None or duration <= 0:
            return 0.0
        shown = self._copies.get(cascade.name)
        if shown is None:
            shown = self._copies[cascade.name] = self._cost.shown_copies(cascade, group)
        return min(planned, shown * planned / duration)

    def _copied(self, group: tuple[int, ...], shown: float) -> Load:
        """Copies that take so many ms while all devices of a node copy: on their own links, and on what they share."""
        cluster = self.cluster
        size = shown * copy_speed(cluster)
        needed: Needed = {("pcie", rank): size / device_copy_speed(cluster) for rank in group}
        for node, count in Counter(node_of(cluster, rank) for rank in group).items():
            needed["host memory", node] = count * size / node_copy_speed(cluster)
        return _load(needed)

    def _computing(self, group: tuple[int, ...], planned: float) -> Work:
        """A plan's times are for a node whose ranks all compute."""
        if self.cores is None:
            return Work(fixed=planned)
        nodes = Counter(node_of(self.cluster, rank) for rank in group)
        return Work(compute=planned / crowding(self.cluster), computing=tuple(nodes.items()))

    def _cascade(self, cascade: Cascade, group: tuple[int, ...], planned: float) -> Work:
        if moves_by_cores(self.cluster, group):
            return self._computing(group, planned)
        duration = cascade.end - cascade.start
        sent = self._sent.get(cascade.name)
        if sent is None:
            sent = self._sent[cascade.name] = self._communication(cascade, group)
        if duration <= 0 or not sent.loads:
            return self._computing(group, planned)
        part = planned / duration  # a train cascade is a forward and a backward
        alone = self._computing(group, max(0.0, planned - part * sent.planned))
        loads = tuple(tuple((ms * part, links) for ms, links in load) for load in sent.loads)
        return Work(alone.fixed + part * sent.latency, alone.compute, alone.computing, loads)

    def _communication(self, cascade: Cascade, group: tuple[int, ...]) -> _Sent:
        sides = [self._side(cascade, ranks, split) for ranks, split in _sides(cascade, group)]  # each among itself
        inside: Needed = defaultdict(float)
        outside: Needed = defaultdict(float)
        for own_inside, own_outside, _, _ in sides:
            for total, needed in ((inside, own_inside), (outside, own_outside)):
                for link, ms in needed.items():
                    total[link] += ms
        latency, planned = max(side[2] for side in sides), max(side[3] for side in sides)
        if not (inside or outside):
            return _Sent()
        loads = tuple(_load(needed) for needed in (inside, outside) if needed)
        # between nodes a plan may count contention within the group, which is on no link
        penalty = planned - latency - sum(max(ms for ms, _ in load) for load in loads)
        return _Sent(planned, latency + max(0.0, penalty), loads)

    def _side(self, cascade: Cascade, ranks: tuple[int, ...], split: Attention) -> tuple[Needed, Needed, float, float]:
        """Of one clip or branch of a cascade: loads inside and between nodes, latency, and what is planned of both."""
        inside: Needed = defaultdict(float)
        outside: Needed = defaultdict(float)
        latency, blocks = 0.0, self._cost.recomputed(cascade)
        sent = self._cost.volumes(cascade, split, blocks)
        if not sent.moved:
            return inside, outside, 0.0, 0.0
        runs = side_by_side(ranks, len(ranks) // sent.ulysses)
        for groups, size, steps in (
            (runs, sent.traded / sent.ulysses, sent.trades * _steps(sent.ulysses)),
            ((ranks,), sent.gathered / sent.degree, sent.gathers * _steps(sent.degree)),
            ((ranks,), sent.dealt / sent.degree, sent.deals * _steps(sent.degree)),
        ):
            for members in groups:
                for unit, total in zip(self._all_to_all(members), (inside, outside), strict=True):
                    for link, ms in unit.items():
                        total[link] += size * ms
            latency += steps * max(self._latency(members) for members in groups)
        if sent.ring > 1:
            for members in (ranks[first :: sent.ulysses] for first in range(sent.ulysses)):
                for source, target in zip(members, (*members[1:], members[0]), strict=True):
                    self._add(inside, outside, source, target, sent.passed)
            latency += sent.hops * self._latency(ranks)
        return inside, outside, latency, self._cost.communication(cascade, split, ranks, blocks)

    def _all_to_all(self, members: tuple[int, ...]) -> tuple[Needed, Needed]:
        """ms on every link per byte that each member sends to each other one: within nodes, and between them."""
        needed = self._units.get(members)
        if needed is None:
            needed = self._units[members] = _all_to_all(self.cluster, members)
        return needed

    def _add(self, inside: Needed, outside: Needed, source: int, target: int, size: float) -> None:
        if source == target:
            return
        path = self.route(source, target)
        needed = inside if path.links[0] == ("port out", source) else outside
        for link, speed in zip(path.links, path.capacities, strict=True):
            needed[link] = needed.get(link, 0.0) + size / speed

    def _latency(self, members: Iterable[int]) -> float:
        gpus = self.cluster.gpus
        nodes = {rank // gpus for rank in members}
        return quantity(self.cluster.attrs["latency" if len(nodes) == 1 else "inter_latency"]) / 1e3

    def _reduce(self, instruction: Instruction, planned: float) -> Work:
        """A ring all-reduce, reduce-scatter or gather through the ranks in order: its bytes on the links of each hop.

        Between nodes the planned time is kept, because libraries choose among many algorithms; the ring only says which
        links are busy.
        """
        group, size = instruction.peers, instruction.attrs.get("bytes", 0)
        if moves_by_cores(self.cluster, group):
            return self._computing(group, planned)
        if len(group) < 2 or not isinstance(size, int) or not size or planned <= 0:
            return Work(fixed=planned)
        inside: Needed = {}
        outside: Needed = {}
        passes = _passes(instruction, self.module.stage(instruction.target))
        per_hop = passes * (len(group) - 1) / len(group) * size
        for source, target in zip(group, (*group[1:], group[0]), strict=True):
            self._add(inside, outside, source, target, per_hop)
        needed = inside | outside
        longest = max(needed.values())
        scale = min(1.0, planned / longest)
        load = _load({link: ms * scale for link, ms in needed.items()})
        return Work(fixed=planned - longest * scale, loads=(load,))


def _passes(instruction: Instruction, stage: Stage) -> int:
    """How often a ring carries every byte of a collective."""
    if instruction.op == "gather":
        return 1
    return 2 if "tied" in instruction.attrs else ring_passes(stage)


def _all_to_all(cluster: Cluster, members: tuple[int, ...]) -> tuple[Needed, Needed]:
    inter, uplink = (1e-6 / speed for speed in (quantity(cluster.attrs["inter"]), uplink_of(cluster)))
    gpus = cluster.gpus
    by_node: dict[int, list[int]] = defaultdict(list)
    for rank in members:
        by_node[rank // gpus].append(rank)
    racks = Counter(rack_of(cluster, ranks[0]) for ranks in by_node.values() for _ in ranks)
    inside: Needed = {}
    outside: Needed = defaultdict(float)
    for node, ranks in by_node.items():
        near, far, rack = len(ranks) - 1, len(members) - len(ranks), rack_of(cluster, ranks[0])
        intra, host = (1e-6 / speed for speed in (intra_of(cluster, ranks[0]), host_of(cluster, ranks[0])))
        if near and host:
            inside["host", node] = near * len(ranks) * host
        for way in ("out", "in"):
            for rank in ranks:
                if near:
                    inside[f"port {way}", rank] = near * intra
                if far:
                    outside[f"nic {way}", node, nic_of(cluster, rank)] += far * inter
        if len(racks) > 1:
            for way in ("up", "down"):
                outside[way, rack] += len(ranks) * (len(members) - racks[rack]) * uplink
    return inside, dict(outside)


def _load(needed: Needed) -> Load:
    """The links grouped by time; times that differ by rounding only are equal."""
    groups: dict[float, list[LinkName]] = {}
    for link, ms in needed.items():
        groups.setdefault(float(f"{ms:.9g}"), []).append(link)
    return tuple((ms, tuple(links)) for ms, links in groups.items())


def _sides(cascade: Cascade, group: tuple[int, ...]) -> list[tuple[tuple[int, ...], Attention]]:
    """The ranks of each clip or branch side by side, and how they share it."""
    if (other := cascade.unconditional) is not None:
        first = group[: cascade.degree]
        return [(first, _split(cascade, len(first))), (group[cascade.degree :], Attention(*other))]
    parts = side_by_side(group, cascade.side)
    return [(ranks, _split(cascade, len(ranks))) for ranks in parts]


def _split(cascade: Cascade, degree: int) -> Attention:
    ulysses = integer(cascade.attrs["ulysses"]) if "ulysses" in cascade.attrs else degree
    ring = integer(cascade.attrs["ring"]) if "ring" in cascade.attrs else degree // ulysses
    return Attention(ulysses, ring)


def _steps(ranks: int) -> int:
    return (ranks - 1).bit_length()
