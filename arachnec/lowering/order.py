"""The global order of a placed module's events; every rank's list is a projection of it.

In: cascades with times and ranks. Out: their order, the handoffs between them, and when each value is freed.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from arachnec.analysis.stage_handoffs import between_stages, handed_gib, parts_handed
from arachnec.analysis.uses import rank_list
from arachnec.cluster.topology import handoff_time, node_of
from arachnec.cost.compute import Compute, Load, share_recomputed
from arachnec.cost.sparse_attention import SparseLoads
from arachnec.cost.strategy import Attention
from arachnec.ir.diagnostic import user_error
from arachnec.ir.head_density import sparse_layers
from arachnec.ir.nodes import Cascade, Cluster, Module, Phase, Stage, formula
from arachnec.ir.sampling import on_one_side
from arachnec.ir.stage_sizes import recomputed_blocks
from arachnec.ir.values import Value

TOLERANCE_MS = 1e-6  # starts and ends are added floats: closer times are equal
FORWARD_SHARE = 1 / 3  # of a train cascade whose stage has no formulas: backward is twice the forward's work
GIB = 2**30
GRADIENT = (Phase.BACKWARD, Phase.WEIGHT)

# A position in the order: the number of a cascade, and one of these.
REPLAN, HANDOFF, FREE_BEFORE, COMPUTE, FREE_AFTER, REDUCE = range(6)
Place = tuple[int, int]


@dataclass(frozen=True)
class Handoff:
    """The value of cascade number ``producer`` goes from one rank to another, right before cascade number ``slot``."""

    producer: int
    source: int
    target: int
    slot: int
    size: int  # bytes


def global_order(cascades: tuple[Cascade, ...]) -> tuple[Cascade, ...]:
    """All cascades by start time, producers before their consumers where the times are equal; round by round, where
    the rest is planned again between rounds."""
    depth = depths(cascades)
    by_name = {cascade.name: cascade for cascade in cascades}
    for cascade in cascades:
        for name in cascade.inputs:
            ready = by_name[name].start
            if ready > cascade.start + TOLERANCE_MS:
                raise user_error(
                    f"%{cascade.name} starts at {cascade.start:g} ms, before its input %{name} does at {ready:g} ms",
                    label="starts too early",
                    help="a cascade starts after the end of every cascade it reads",
                    span=cascade.span,
                )
    indexed = sorted(
        enumerate(cascades),
        key=lambda item: (item[1].round, item[1].start, item[1].end, depth[item[1].name], item[0]),
    )
    return _stable_topological(tuple(cascade for _, cascade in indexed))


def depths(cascades: tuple[Cascade, ...]) -> dict[str, int]:
    """The length of the longest chain of inputs below every cascade."""
    by_name = {cascade.name: cascade for cascade in cascades}
    readers: dict[str, list[str]] = defaultdict(list)
    waiting: dict[str, int] = {}
    for cascade in cascades:
        waiting[cascade.name] = len(cascade.inputs)
        for name in cascade.inputs:
            if name not in by_name:
                raise user_error(
                    f"%{cascade.name} reads %{name}, and there is no such cascade",
                    label="unknown input",
                    help="name a cascade of this module",
                    span=cascade.span,
                )
            readers[name].append(cascade.name)
    depth = {name: 0 for name, count in waiting.items() if count == 0}
    ready = list(depth)
    for name in ready:
        for reader in readers[name]:
            waiting[reader] -= 1
            if waiting[reader] == 0:
                depth[reader] = 1 + max(depth[i] for i in by_name[reader].inputs)
                ready.append(reader)
    for cascade in cascades:
        if cascade.name not in depth:
            raise user_error(
                f"%{cascade.name} waits for itself",
                label="reads a value that depends on its own",
                help="the inputs of cascades must not form a cycle",
                span=cascade.span,
            )
    return depth


def round_bounds(order: Sequence[Cascade]) -> list[tuple[int, int]]:
    """For every place in the order the first of its round, and the first behind it."""
    bounds: list[tuple[int, int]] = []
    for _, cascades in groupby(order, key=lambda cascade: cascade.round):
        first, count = len(bounds), sum(1 for _ in cascades)
        bounds += [(first, first + count)] * count
    return bounds


def _stable_topological(ordered: tuple[Cascade, ...]) -> tuple[Cascade, ...]:
    """The closest order in which no consumer stands before its producer, where rounding has put one there."""
    position = {cascade.name: i for i, cascade in enumerate(ordered)}
    readers: dict[int, list[int]] = defaultdict(list)
    waiting = [len(cascade.inputs) for cascade in ordered]
    for i, cascade in enumerate(ordered):
        for name in cascade.inputs:
            readers[position[name]].append(i)
    ready = [i for i, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    result: list[Cascade] = []
    while ready:
        i = heapq.heappop(ready)
        result.append(ordered[i])
        for reader in readers[i]:
            waiting[reader] -= 1
            if waiting[reader] == 0:
                heapq.heappush(ready, reader)
    return tuple(result)


def reads_saved(cascade: Cascade, source: Cascade) -> bool:
    """Whether ``cascade`` reads what ``source`` saved on the same ranks, rather than a value that can be handed off."""
    return cascade.phase in GRADIENT and cascade.stage == source.stage and source.phase is not Phase.ENCODE


def plan_handoffs(module: Module, cluster: Cluster, order: tuple[Cascade, ...]) -> list[Handoff]:
    """All handoffs in global order: each as soon as its producer ends, and before the rank's first consumer."""
    stages = {stage.name: stage for stage in module.stages}
    position = {cascade.name: i for i, cascade in enumerate(order)}
    named = {cascade.name: cascade for cascade in order}
    starts, bounds = [cascade.start for cascade in order], round_bounds(order)
    handoffs: list[Handoff] = []
    sent: set[tuple[int, int]] = set()
    load: Counter[tuple[int, int]] = Counter()
    for i, cascade in enumerate(order):
        for name in cascade.inputs:
            p = position[name]
            producer = order[p]
            if reads_saved(cascade, producer):
                if cascade.ranks != producer.ranks:
                    ranks, holders = rank_list(cascade.ranks), rank_list(producer.ranks)
                    raise user_error(
                        f"%{cascade.name} runs on ranks {ranks}, but what %{name} saved for it lies on ranks {holders}",
                        label="must run where its forward ran",
                        help="place both on the same ranks, in the same order",
                        span=cascade.span,
                    )
                continue
            # what another round has made is sent in the round that reads it
            earliest = bisect.bisect_left(starts, producer.end - TOLERANCE_MS, bounds[i][0], i)
            slot = max(p + 1, earliest)
            held = producer.ranks
            if between_stages(producer, cascade):
                for source, target, gib in parts_handed(producer, cascade, stages, named):
                    if target not in held and (p, target) not in sent:
                        handoffs.append(Handoff(p, source, target, slot, round(gib * GIB)))
                sent |= {(p, target) for target in cascade.ranks}
                continue
            size = round(handed_gib(producer, cascade, stages, named) * GIB)
            for target in cascade.ranks:
                if target in held or (p, target) in sent:
                    continue
                source = min(held, key=lambda r: (node_of(cluster, r) != node_of(cluster, target), load[p, r], r))
                load.update([(p, source)])
                sent.add((p, target))
                handoffs.append(Handoff(p, source, target, slot, size))
    return sorted(handoffs, key=lambda h: (h.slot, order[h.producer].end, h.producer))


def plan_frees(cluster: Cluster, order: tuple[Cascade, ...], handoffs: list[Handoff]) -> list[tuple[int, Place, str]]:
    """When every rank frees its values: after their last reader, and after their sends are expected to complete.

    A send completes when its target reaches the receive, and the target's earlier cascades may delay that. A free
    placed earlier would make the source wait.
    """
    position = {cascade.name: i for i, cascade in enumerate(order)}
    starts, bounds = [cascade.start for cascade in order], round_bounds(order)
    last_backward: dict[int, int] = {}
    for i, cascade in enumerate(order):
        for name in cascade.inputs:
            if reads_saved(cascade, order[position[name]]):
                last_backward[position[name]] = i
    drops: dict[tuple[int, int], Place] = {}
    for i, cascade in enumerate(order):
        # The inputs of a forward are read again by its backward.
        place = (last_backward.get(i, i), FREE_AFTER)
        for name in cascade.inputs:
            if reads_saved(cascade, order[position[name]]):
                continue
            for rank in cascade.ranks:
                key = (rank, position[name])
                drops[key] = max(drops.get(key, place), place)
    ends: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for i, cascade in enumerate(order):
        for rank in cascade.ranks:
            ends[rank].append((i, cascade.end))
    for handoff in handoffs:
        busy = bisect.bisect_left(ends[handoff.target], (handoff.slot, -math.inf))
        ready = ends[handoff.target][busy - 1][1] if busy else 0.0
        sent = max(ready, order[handoff.producer].end) + handoff_time(
            cluster, handoff.source, handoff.target, handoff.size
        )
        until = bounds[handoff.slot][1]
        place = (bisect.bisect_left(starts, sent, handoff.slot, until), FREE_BEFORE)
        key = (handoff.source, handoff.producer)
        drops[key] = max(drops.get(key, place), place)
    read = {name for cascade in order for name in cascade.inputs}
    for i, cascade in enumerate(order):
        # A request's last latents, or its video, are delivered where they are freed.
        if cascade.phase in (Phase.DENOISE, Phase.DECODE) and cascade.name not in read:
            drops.update({(rank, i): (i, FREE_AFTER) for rank in cascade.ranks})
    for p in {value for _, value in drops}:
        # Ranks of an encoder that neither read nor send its output free it at once.
        for rank in order[p].ranks:
            drops.setdefault((rank, p), (p, FREE_AFTER))
    return [(rank, place, order[value].name) for (rank, value), place in drops.items()]


def evaluate(value: Value | None, cascade: Cascade) -> float:
    """A stage's formula at a cascade's sizes; 0 where the stage has none."""
    if value is None:
        return 0.0
    return formula(value)(B=cascade.batch, S=cascade.tokens, T=cascade.text)


def forward_share(cascade: Cascade, stage: Stage) -> float:
    """The part of a train cascade's time that its forward takes, by the stage's formulas."""
    if sparse_layers(cascade):
        times = Compute({stage.name: stage}, frozenset(), SparseLoads({stage.name: stage}))
        grid, blocks = Attention(cascade.degree, 1), recomputed_blocks(cascade.attrs.get("recompute"), stage)
        first, second = times.halves(on_one_side(cascade, cascade.side), cascade.degree, grid, blocks, (Load(),))
        return first / (first + second)
    forward = evaluate(stage.attrs.get("forward"), cascade)
    again = share_recomputed(stage, recomputed_blocks(cascade.attrs.get("recompute"), stage)) * forward
    backward = evaluate(stage.attrs.get("backward"), cascade) + again
    return forward / (forward + backward) if forward > 0 and backward > 0 else FORWARD_SHARE
