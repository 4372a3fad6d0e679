"""The cluster as a graph, and which of its links a group of ranks uses.

Rank r is device ``r % gpus`` of node ``r // gpus``; with racks, node n is in rack ``n // rack``, and all devices of a
rack share its uplink to the others. The graph has a vertex for every rank, NIC, NUMA domain, node and rack and one for
the fabric between them; an edge carries GB/s and us.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import combinations, compress
from operator import eq, ne
from typing import TypeAlias

import networkx as nx

from arachnec.cluster.device_specs import find_device_specs
from arachnec.ir.diagnostic import counted, user_error
from arachnec.ir.nodes import Cluster, integer, quantity
from arachnec.ir.values import Quantity, Value

Vertex: TypeAlias = tuple[str | int, ...]

# Contention between the nodes of one group, as Arachne models it: 1 within a node, else 1 + A exp(-B overlap).
CONTENTION = 0.21138606
CONTENTION_DECAY = 1.47904728


@dataclass(frozen=True)
class Link:
    """What one rank of a group sends, as fractions of its bytes, and over which links."""

    inside: float  # to other ranks of its node
    outside: float  # to ranks of other nodes
    carried: float  # what all ranks on the busiest NIC together send to other nodes, in the same unit
    hosted: float  # what all ranks of the busiest node together send to each other
    shared: float  # what all ranks of the busiest rack together send to other racks
    intra: float  # GB/s
    host: float  # GB/s of a node; infinite where devices have links of their own
    inter: float  # GB/s
    uplink: float  # GB/s of a rack; infinite without racks
    latency: float  # us of the slowest link used


def node_of(cluster: Cluster, rank: int) -> int:
    return rank // cluster.gpus


def has_gpus(cluster: Cluster) -> bool:
    """Whether its ranks compute on GPUs, all of them: no cluster has both."""
    return cluster.attrs["device"] != "cpu"


def moves_by_cores(cluster: Cluster, ranks: Sequence[int]) -> bool:
    """Whether these ranks' messages are copied by the cores that compute: CPU ranks of one node."""
    return not has_gpus(cluster) and len({node_of(cluster, rank) for rank in ranks}) == 1


def rack_of(cluster: Cluster, rank: int) -> int:
    """The rack of a rank's node; 0 where the cluster has no racks."""
    rack = cluster.attrs.get("rack")
    return 0 if rack is None else node_of(cluster, rank) // integer(rack)


@lru_cache(maxsize=64)
def _nodes_and_racks(cluster: Cluster) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of every rank the node and the rack: a link of a wide group asks for thousands."""
    ranks = range(cluster.world)
    return tuple(node_of(cluster, rank) for rank in ranks), tuple(rack_of(cluster, rank) for rank in ranks)


def uplink_of(cluster: Cluster) -> float:
    """GB/s from one rack to the others, for all its devices together; infinite where the cluster has no racks."""
    uplink = cluster.attrs.get("uplink")
    return math.inf if uplink is None or "rack" not in cluster.attrs else quantity(uplink)


@dataclass(frozen=True)
class Machine:
    """What the devices of one node are, where a cluster's nodes differ."""

    device: str
    memory: float  # GiB
    flops: float  # TFLOP/s
    intra: float  # GB/s


@lru_cache(maxsize=64)
def machines(cluster: Cluster) -> tuple[Machine, ...]:
    """One for each node."""
    attrs = cluster.attrs
    mixed = attrs.get("mixed")
    if not isinstance(mixed, tuple):
        memory, flops, intra = (quantity(attrs[name]) for name in ("memory", "flops", "intra"))
        return (Machine(str(attrs["device"]), memory, flops, intra),) * cluster.nodes
    nodes: list[Machine] = []
    for row in mixed:
        assert isinstance(row, tuple), "the table of the cluster's attributes says so"
        count, device, memory_of, flops_of, intra_of = row
        machine = Machine(str(device), quantity(memory_of), quantity(flops_of), quantity(intra_of))
        nodes += [machine] * integer(count)
    return tuple(nodes)


def machine_of(cluster: Cluster, rank: int) -> Machine:
    """What one device is: its node's, and as much slower as a run measured it."""
    machine, slower = machines(cluster)[node_of(cluster, rank)], slowdowns_of(cluster).get(rank)
    return machine if slower is None else replace(machine, flops=machine.flops / slower)


@lru_cache(maxsize=64)
def slowdowns_of(cluster: Cluster) -> dict[int, float]:
    """How much more slowly than it should each rank computes that a run found slow."""
    rows = cluster.attrs.get("slowed", ())
    assert isinstance(rows, tuple)
    slowed = {}
    for row in rows:
        assert isinstance(row, tuple) and isinstance(row[1], int | float)
        slowed[integer(row[0])] = float(row[1])
    return slowed


def with_slowdowns(cluster: Cluster, slowdowns: Mapping[int, float]) -> Cluster:
    """The cluster with these ranks so many times slower."""
    rows = tuple(sorted((rank, slower) for rank, slower in slowdowns.items()))
    return replace(cluster, attrs=cluster.attrs.updated(slowed=rows or None))


def named(cluster: Cluster) -> str:
    """For people: nodes, devices of each, and what they are, as ``2 x 8 x h100-80g + 1 x 8 x a100-80g``."""
    mixed = cluster.attrs.get("mixed")
    if not isinstance(mixed, tuple):
        nodes = f"{cluster.nodes} x " if cluster.nodes > 1 else ""
        return f"{nodes}{cluster.gpus} x {cluster.attrs.get('device', 'ranks')}"
    counts: dict[str, int] = {}
    for machine in machines(cluster):
        counts[machine.device] = counts.get(machine.device, 0) + 1
    return " + ".join(f"{nodes} x {cluster.gpus} x {device}" for device, nodes in counts.items())


def mix_of(cluster: Cluster, nodes: int) -> Value | None:
    """What ``mixed`` says of the first so many nodes, further ones being like the last; None where all are alike."""
    mixed = cluster.attrs.get("mixed")
    if not isinstance(mixed, tuple):
        return None
    rows: list[Value] = []
    for number, row in enumerate(mixed, 1):
        assert isinstance(row, tuple), "the table of the cluster's attributes says so"
        count = nodes if number == len(mixed) else min(nodes, integer(row[0]))
        nodes -= count
        if count:
            rows.append((count, *row[1:]))
    return tuple(rows)


def kinds_of_ranks(cluster: Cluster) -> tuple[tuple[int, ...], ...]:
    """The ranks of each kind of device, those with most memory first; one tuple of all where they are alike."""
    kinds: dict[Machine, list[int]] = {}
    for rank in range(cluster.world):
        kinds.setdefault(machine_of(cluster, rank), []).append(rank)
    return tuple(tuple(kinds[kind]) for kind in sorted(kinds, key=lambda kind: (-kind.memory, -kind.flops)))


def packed_ranks(cluster: Cluster, degree: int, spans_nodes: int | None = None) -> tuple[int, ...]:
    """Ranks of an empty cluster on as few nodes as hold them, or as evenly as possible over ``spans_nodes``.

    Raises ValueError where the cluster has not that many.
    """
    if degree > cluster.world:
        raise ValueError(f"degree {degree} on {cluster.world} ranks")
    if spans_nodes is None:
        return tuple(range(degree))
    if not math.ceil(degree / cluster.gpus) <= spans_nodes <= min(degree, cluster.nodes):
        raise ValueError(f"degree {degree} cannot span {spans_nodes} nodes of {cluster.gpus}")
    share, extra = divmod(degree, spans_nodes)
    return tuple(
        node * cluster.gpus + device
        for node in range(spans_nodes)
        for device in range(share + (1 if node < extra else 0))
    )


def group_link(cluster: Cluster, ranks: tuple[int, ...]) -> Link:
    """The link of a gather or an all-reduce over all these ranks, for the rank that sends most to other nodes.

    Such collectives run as rings through the ranks in order, so that every byte leaves a rack once.
    """
    nodes, rack = _nodes_and_racks(cluster)
    racks = {rack[rank] for rank in ranks}
    passed = (len(ranks) - 1) / len(ranks)
    busiest = max(Counter(nodes[rank] for rank in ranks).values())
    hosted = passed * (busiest if busiest == len(ranks) else busiest - 1)
    return _link(cluster, [ranks], 0.0, hosted, passed if len(racks) > 1 else 0.0)


def ulysses_link(cluster: Cluster, ranks: tuple[int, ...], ulysses: int) -> Link:
    """The link of the all-to-alls: their groups are runs of ``ulysses`` consecutive ranks of the cascade."""
    nodes, racks = _nodes_and_racks(cluster)
    if ranks == tuple(range(len(ranks))) and "mixed" not in cluster.attrs:
        # the groups of packed ranks lie in nodes and racks as those of the first ranks do, again and again
        ranks = ranks[: math.lcm(ulysses, cluster.gpus * integer(cluster.attrs.get("rack", 1)))]
    groups = [ranks[first : first + ulysses] for first in range(0, len(ranks), ulysses)]
    shared: Counter[int] = Counter()
    hosted: Counter[int] = Counter()
    carried: Counter[tuple[int, str]] = Counter()
    for group in groups:
        for rack, members in Counter(racks[rank] for rank in group).items():
            shared[rack] += members * (len(group) - members)
        near = Counter(nodes[rank] for rank in group)
        for node, members in near.items():
            hosted[node] += members * (members - 1)
        if len(near) > 1:
            for rank in group:
                carried[nodes[rank], nic_of(cluster, rank)] += len(group) - near[nodes[rank]]
    busiest = (max(count.values(), default=0) / ulysses for count in (carried, hosted, shared))
    return _link(cluster, groups, *busiest)


def ring_link(cluster: Cluster, ranks: tuple[int, ...], ulysses: int) -> Link:
    """The link of the rings: every ``ulysses``-th rank of the cascade, each sending to the next."""
    nodes, racks = _nodes_and_racks(cluster)
    following = (*ranks[ulysses:], *ranks[:ulysses])  # of each rank the next of its ring
    from_nodes, to_nodes = [nodes[rank] for rank in ranks], [nodes[rank] for rank in following]
    crossing = from_nodes != to_nodes
    shared = Counter(racks[a] for a, b in zip(ranks, following, strict=True) if racks[a] != racks[b])
    hosted = Counter(compress(from_nodes, map(eq, from_nodes, to_nodes)))
    letters = map(partial(nic_of, cluster), compress(ranks, map(ne, from_nodes, to_nodes)))
    carried = Counter(zip(compress(from_nodes, map(ne, from_nodes, to_nodes)), letters, strict=True))
    busiest = (float(max(count.values(), default=0)) for count in (carried, hosted, shared))
    return _with_fractions(cluster, [ranks], 0.0 if crossing else 1.0, 1.0 if crossing else 0.0, *busiest)


def _link(cluster: Cluster, groups: Sequence[tuple[int, ...]], carried: float, hosted: float, shared: float) -> Link:
    gpus = cluster.gpus
    worst = (0.0, 0.0)
    for group in groups:
        counts = Counter(rank // gpus for rank in group)
        fewest = min(counts.values())
        worst = max(worst, ((len(group) - fewest) / len(group), (fewest - 1) / len(group)))
    outside, inside = worst
    return _with_fractions(cluster, groups, inside, outside, carried, hosted, shared)


def intra_of(cluster: Cluster, rank: int) -> float:
    """GB/s from a rank's device to another of its node."""
    if "mixed" not in cluster.attrs:
        return quantity(cluster.attrs["intra"])
    return machines(cluster)[node_of(cluster, rank)].intra


def host_of(cluster: Cluster, rank: int) -> float:
    """GB/s that the devices of a rank's node share, where they have no links of their own; else infinite."""
    if "mixed" in cluster.attrs:
        specs = find_device_specs(machines(cluster)[node_of(cluster, rank)].device)
        return specs.host if specs else math.inf
    host = cluster.attrs.get("host")
    return math.inf if host is None else quantity(host)


def _with_fractions(
    cluster: Cluster,
    groups: Sequence[tuple[int, ...]],
    inside: float,
    outside: float,
    carried: float,
    hosted: float,
    shared: float,
) -> Link:
    """With the speeds of the slowest node."""
    attrs = cluster.attrs
    first, node = groups[0][0], _nodes_and_racks(cluster)[0]
    mixed = "mixed" in attrs
    nodes = {node[rank]: rank for group in groups for rank in group}.values() if mixed else (first,)
    return Link(
        inside,
        outside,
        carried,
        hosted,
        shared,
        intra=min(intra_of(cluster, rank) for rank in nodes),
        host=min(host_of(cluster, rank) for rank in nodes),
        inter=quantity(attrs["inter"]),
        uplink=uplink_of(cluster),
        latency=quantity(attrs["inter_latency"]) if outside else quantity(attrs["latency"]),
    )


@lru_cache(maxsize=4096)
def penalty(cluster: Cluster, ranks: tuple[int, ...]) -> float:
    """Slowdown of a group's traffic between nodes: 1 within a node, 1.05 to 1.21 by how its nodes' NICs match.

    ``overlap`` is the intersection of the nodes' NIC sets over the largest NIC set; where a group is on more than two
    nodes the worst pair counts.
    """
    gpus, letters = cluster.gpus, cluster.attrs.get("nics")
    nodes: dict[int, set[str]] = {}
    for rank in ranks:
        nodes.setdefault(rank // gpus, set()).add(letters[rank % gpus] if isinstance(letters, str) else "A")
    if len(nodes) < 2:
        return 1.0
    sets = sorted({tuple(sorted(nics)) for nics in nodes.values()})
    if len(sets) == 1:
        return _contention(1.0)
    overlap = min(len(set(a) & set(b)) / max(len(a), len(b)) for a, b in combinations(sets, 2))
    return _contention(overlap)


def _contention(overlap: float) -> float:
    return 1.0 + CONTENTION * math.exp(-CONTENTION_DECAY * overlap)


def nic_of(cluster: Cluster, rank: int) -> str:
    """The letter of the NIC that a rank's device sits on; without a map each node has one."""
    nics = cluster.attrs.get("nics")
    return nics[rank % cluster.gpus] if isinstance(nics, str) else "A"


def numa_of(cluster: Cluster, rank: int) -> int:
    """The NUMA domain of a rank's NIC: the first half of the NIC letters is on domain 0."""
    nics = cluster.attrs.get("nics")
    if not isinstance(nics, str):
        return 0
    letters = sorted(set(nics))
    return int(letters.index(nics[rank % cluster.gpus]) >= (len(letters) + 1) // 2)


@lru_cache(maxsize=16)
def topology(cluster: Cluster) -> nx.Graph[Vertex]:
    """The links of a cluster as a graph; vertices are tuples such as ("rank", 3), ("nic", 0, "A"), ("fabric",)."""
    inter = quantity(cluster.attrs["inter"])
    latency, inter_latency = quantity(cluster.attrs["latency"]), quantity(cluster.attrs["inter_latency"])
    graph: nx.Graph[Vertex] = nx.Graph()
    for rank in range(cluster.world):
        node = node_of(cluster, rank)
        nic, numa = ("nic", node, nic_of(cluster, rank)), ("numa", node, numa_of(cluster, rank))
        graph.add_edge(("rank", rank), ("switch", node), bandwidth=intra_of(cluster, rank), latency=latency / 2)
        graph.add_edge(("rank", rank), nic, bandwidth=inter, latency=0.0)
        graph.add_edge(nic, numa, bandwidth=inter, latency=0.0)
        above: Vertex = ("rack", rack_of(cluster, rank)) if "rack" in cluster.attrs else ("fabric",)
        graph.add_edge(numa, above, bandwidth=math.inf, latency=inter_latency / 2)
        if above != ("fabric",):
            graph.add_edge(above, ("fabric",), bandwidth=uplink_of(cluster), latency=0.0)
    return graph


def host_link_of(cluster: Cluster) -> float | None:
    """GB/s at which a node hands values over on its host's network; None where that was not measured."""
    speed = cluster.attrs.get("host_link")
    return None if speed is None else quantity(speed)


def handoff_time(cluster: Cluster, source: int, target: int, size: float) -> float:
    """ms to move ``size`` bytes from one rank to another; 0 on the same rank.

    As fast as it was ``measured``; else over the hosts' network where its speed is known, else as if over the devices'
    links.
    """
    if source == target:
        return 0.0
    same_node = node_of(cluster, source) == node_of(cluster, target)
    measured = _measured(cluster).get((min(source, target), max(source, target)))
    if measured is not None:
        return size / (measured * 1e9) * 1e3
    speed = host_link_of(cluster) or _device_speed(cluster, source, target)
    return size / (speed * 1e9) * 1e3 + quantity(cluster.attrs["latency" if same_node else "inter_latency"]) * 1e-3


@lru_cache(maxsize=64)
def _measured(cluster: Cluster) -> dict[tuple[int, int], float]:
    """GB/s of handoffs between two ranks, the lower one first, where a run measured them."""
    rows = cluster.attrs.get("measured", ())
    assert isinstance(rows, tuple)
    measured = {}
    for row in rows:
        assert isinstance(row, tuple)
        measured[integer(row[0]), integer(row[1])] = quantity(row[2])
    return measured


def with_measured(cluster: Cluster, speeds: Mapping[tuple[int, int], float]) -> Cluster:
    """The cluster with these GB/s between two ranks, the lower one first."""
    rows = tuple((a, b, Quantity(speed, "GB/s")) for (a, b), speed in sorted(speeds.items()))
    return replace(cluster, attrs=cluster.attrs.updated(measured=rows or None))


def _device_speed(cluster: Cluster, source: int, target: int) -> float:
    same_node = node_of(cluster, source) == node_of(cluster, target)
    speed = min(intra_of(cluster, source), host_of(cluster, source)) if same_node else quantity(cluster.attrs["inter"])
    if rack_of(cluster, source) != rack_of(cluster, target):
        speed = min(speed, uplink_of(cluster))
    return speed


def cluster_for(cluster: Cluster, world: int) -> Cluster:
    """The same machines with ``world`` ranks. Raises ``UserError`` where they cannot be divided so."""
    if world == cluster.world:
        return cluster
    if world <= cluster.gpus:
        changed = cluster.attrs.updated(nodes=1, gpus=world, nics=_first(cluster, world), mixed=mix_of(cluster, 1))
        return replace(cluster, attrs=changed)
    if world % cluster.gpus:
        raise user_error(
            f"the plan is for {counted(cluster.world, 'rank')} and cannot be made again for {world}",
            help=(
                f"give at most {counted(cluster.gpus, 'rank')}, or a multiple of {cluster.gpus}, or compile for "
                "another cluster"
            ),
        )
    nodes = world // cluster.gpus
    return replace(cluster, attrs=cluster.attrs.updated(nodes=nodes, mixed=mix_of(cluster, nodes)))


def _first(cluster: Cluster, count: int) -> str | None:
    nics = cluster.attrs.get("nics")
    return nics[:count] if isinstance(nics, str) else None
