"""A cascade on ranks: its grid of Ulysses x ring, and when it starts and ends there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from arachnec.cluster.topology import handoff_time, node_of
from arachnec.cost.memory import GIB
from arachnec.cost.model import CostModel
from arachnec.cost.strategy import Attention, Strategy, first_ranks, sides_of
from arachnec.cost.table import Entry
from arachnec.ir.head_density import sparse_layers
from arachnec.ir.nodes import Cascade, Phase
from arachnec.ir.stage_sizes import gib, recompute_value, times_of
from arachnec.ir.values import Quantity
from arachnec.lowering.order import reads_saved
from arachnec.solver.bound import NEGLIGIBLE


def on(
    cascade: Cascade, ranks: tuple[int, ...], inputs: Sequence[Cascade], actual: Sequence[float], cost: CostModel
) -> Cascade:
    placed = with_ranks(cascade, ranks, cost, _recomputed(cascade, ranks, inputs, cost))
    arrived = max((producer.end + arrival(producer, placed, cost) for producer in inputs), default=0.0)
    start = max(arrived, *(actual[rank] for rank in ranks))
    return placed.with_attrs(start=_ms(start), end=_ms(start + (placed.end - placed.start)))


def _recomputed(cascade: Cascade, ranks: tuple[int, ...], inputs: Sequence[Cascade], cost: CostModel) -> int:
    """How many blocks it recomputes on these ranks: what fits their devices. A forward of a pipeline no fewer than
    planned, since others' values lie there, too; its backward as many as it."""
    planned = cost.recomputed(cascade)
    if not cost.devices.kinds:
        return planned
    if cascade.phase is Phase.BACKWARD:
        return next((cost.recomputed(source) for source in inputs if reads_saved(cascade, source)), planned)
    least = cost.recompute_at(cascade, cascade.width, ranks) or 0
    return max(planned, least) if cascade.phase is Phase.FORWARD else least


def with_ranks(cascade: Cascade, ranks: tuple[int, ...], cost: CostModel, recompute: int) -> Cascade:
    """The cascade on these ranks, with the cheapest product of Ulysses and ring, as long as it takes there."""
    if cost.devices.kinds and cascade.phase is Phase.DENOISE:  # on these ranks branches may lie better otherwise
        cascade = divided(cascade, len(ranks), _best_way(cascade, ranks, cost))
    cheapest = cost.table.entry(cascade, cascade.width, ranks, sides_of(cascade, recompute))
    entry = _on_family_grid(cascade, ranks, cheapest, cost) if cost.has_attention(cascade) else cheapest
    split = entry.strategy.attention if cost.has_attention(cascade) else None
    duration = cascade.end - cascade.start + max(0.0, entry.time - cheapest.time)
    if cost.devices.kinds:
        memory = Quantity(round(entry.memory, 6), "GiB")
        cascade = cascade.with_attrs(recompute=recompute_value(recompute, cost.stages[cascade.stage]), memory=memory)
        duration = entry.time
    elif not times_of(cascade) and len({node_of(cost.cluster, rank) for rank in ranks}) > 1:
        # the tick to which the scheduler rounded up is not taken away again
        duration = max(duration, entry.time)
    return cascade.with_attrs(
        ranks=ranks,
        ulysses=split.ulysses if split else None,
        ring=split.ring if split else None,
        end=Quantity(cascade.start + duration, "ms"),
    )


def _best_way(cascade: Cascade, ranks: tuple[int, ...], cost: CostModel) -> Strategy:
    """How these ranks do a denoise soonest, of the ways that fit beside every model, since nobody knows yet which lie
    here, or that need no more than what was planned; as it was planned where none does."""
    whole = cascade.with_attrs(planned=None)  # what a switch may leave of it decides nothing
    ways = cost.table.ways(whole, len(ranks), ranks)
    rows = [cost.table.entry(whole, len(ranks), ranks, way) for way in ways]
    planned = cost.table.entry(whole, len(ranks), ranks, sides_of(cascade))
    alone = cost.room_on(ranks, len(ranks), cascade.stage)
    others = sum(gib(stage.attrs.get("state")) for stage in cost.stages.values() if stage.name != cascade.stage)
    room = max(alone - others, min(planned.memory, alone))
    best = min((row for row in rows if row.memory <= room), key=lambda row: row.time, default=None)
    return sides_of(cascade) if best is None else replace(best.strategy, attention=None)


def divided(cascade: Cascade, width: int, strategy: Strategy) -> Cascade:
    """A cascade whose clips or branches lie side by side on so many ranks as a strategy says."""
    side, other = strategy.sides, strategy.unconditional
    return cascade.with_attrs(
        degree=first_ranks(strategy, width),
        side=side if side > 1 else None,
        unconditional=None if other is None else (other.ulysses, other.ring),
    )


def _on_family_grid(cascade: Cascade, ranks: tuple[int, ...], cheapest: Entry, cost: CostModel) -> Entry:
    """The cheapest grid, or the cheapest of the family's that takes negligibly longer."""
    grids = cost.family_grids
    split = cheapest.strategy.attention
    if cascade.degree == 1 or sparse_layers(cascade) or (split is not None and (split.ulysses, split.ring) in grids):
        return cheapest
    offered = [
        cost.table.entry(cascade, cascade.width, ranks, replace(cheapest.strategy, attention=Attention(ulysses, ring)))
        for ulysses, ring in grids
        if ulysses * ring == cascade.degree
    ]
    best = min(offered, key=lambda entry: entry.time, default=cheapest)
    return best if best.time <= cheapest.time * (1 + NEGLIGIBLE) else cheapest


def arrival(producer: Cascade, consumer: Cascade, cost: CostModel) -> float:
    """ms after the producer's end at which the consumer's last rank has what it reads of it."""
    size = cost.handed(producer, consumer) * GIB
    if not size:
        return 0.0
    holders = producer.ranks
    targets = [rank for rank in consumer.ranks if rank not in holders]
    return max((handoff_time(cost.cluster, holders[0], rank, size) for rank in targets), default=0.0)


def _ms(value: float) -> Quantity:
    return Quantity(round(value, 6), "ms")
