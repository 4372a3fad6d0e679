"""Gradient buckets: split every stage's all-reduce so that most of it overlaps the last backwards.

In: a placed module. Out: the module with ``buckets`` on its reduces, time-reversed where that synchronises earlier.

A backward runs from the last layer to the first. The gradients of a run of layers are complete once the rank's last
backward has passed it. With one all-reduce per bucket (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3) all
but the last bucket can finish before that backward ends. Small buckets start early but pay one latency each. The cost
model decides on this plan, because an all-reduce starts only when every rank has reached it.

Gradients are complete only in a rank's *last* backward, and schedules tend to end with short cascades. Where no cascade
reads another, the plan may be reversed in time. Every rank then ends with a long cascade, which hides more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate

from arachnec.cost.model import CostModel
from arachnec.ir.host_placement import layers_in_host
from arachnec.ir.nodes import Cascade, Cluster, Module, Phase, Reduce, Stage, integers
from arachnec.ir.parameter_cells import cell_of, replicas
from arachnec.ir.stage_sizes import (
    Bucket,
    buckets_of,
    gradient_bytes,
    gradient_element_bytes,
    layers_of,
    remaining_backward,
)
from arachnec.ir.values import Quantity
from arachnec.lowering.order import GRADIENT, forward_share, global_order

MIB = 2**20

MOST_BUCKETS = 8  # each is an instruction on every rank

NEGLIGIBLE_GAIN = 0.01  # of what the best buckets gain over one all-reduce: fewer buckets that lose less are preferred


def with_buckets(module: Module, mib: int | None = None, reverse: bool = True) -> Module:
    """A placed module with ``buckets`` on its reduces, each of ``mib`` MiB, or as ``best_buckets`` chooses.

    With ``reverse`` the plan may be reversed in time: the direction whose last bucket ends first is returned.
    """
    assert module.cluster is not None
    plans = [module, *([time_reversed(module)] if reverse and can_reverse(module) else [])]
    cost = CostModel(module)
    bucketed = [_bucketed(plan, module.cluster, cost, mib) for plan in plans]
    return min(bucketed, key=lambda plan: plan[0])[1]


def _bucketed(module: Module, cluster: Cluster, cost: CostModel, mib: int | None) -> tuple[float, Module]:
    """The end of the last bucket in ms, and the module with its buckets."""
    splits = [_split(module, cluster, cost, node, mib) for node in module.reductions]
    end = max((end for end, _ in splits), default=0.0)
    return end, replace(module, reductions=tuple(node for _, node in splits))


def _split(module: Module, cluster: Cluster, cost: CostModel, node: Reduce, mib: int | None) -> tuple[float, Reduce]:
    stage = module.stage(node.stage)
    ranks = integers(node.attrs.get("ranks", tuple(range(cluster.world))))
    cell = cell_of(stage) or 1
    same = replicas(ranks[0], cell, ranks)  # in cells a shard is all-reduced over one rank of each
    if not layers_of(stage) or len(same) < 2 or {"bytes", "time"} & set(node.attrs) or layers_in_host(stage):
        return 0.0, node

    def time(size: float) -> float:
        return cost.reduce_time(stage, same, size / cell)

    ends = last_backwards(module, stage, ranks)
    buckets = best_buckets(stage, ends, time) if mib is None else buckets_of_size(stage, mib * MIB)
    end = finish(buckets_of(stage, buckets), len(layers_of(stage)), ends, cache(time))
    return end, replace(node, attrs=node.attrs.updated(buckets=buckets)) if len(buckets) > 1 else node


def buckets_of_size(stage: Stage, size: float) -> tuple[int, ...]:
    """Layers per bucket, from the last layer: each bucket holds at least ``size`` bytes, the last one what is left."""
    buckets: list[int] = []
    filled, count = 0.0, 0
    for _, parameters in reversed(layers_of(stage)):
        filled, count = filled + parameters * gradient_element_bytes(stage), count + 1
        if filled >= size:
            buckets.append(count)
            filled, count = 0.0, 0
    return (*buckets, count)


# For every rank: the end of its last backward, and how long before that its first gradients are complete; ms.
Ends = Sequence[tuple[float, float]]


def best_buckets(stage: Stage, ends: Ends, time: Callable[[float], float]) -> tuple[int, ...]:
    """The fewest buckets whose last ends about as early as that of any ``MOST_BUCKETS`` buckets.

    ``time`` is the ms of an all-reduce of so many bytes; it is taken to be a latency and a rate.

    Dynamic programming over the lowest layer of the newest bucket. The earlier the buckets above it end, the earlier
    all that follow can.
    """
    sizes = [count * gradient_element_bytes(stage) for _, count in layers_of(stage)]
    number, total = len(sizes), gradient_bytes(stage)
    if not total:
        return (number,)
    below = [0, *accumulate(sizes)]  # bytes of the layers below each
    rate = (time(total) - time(total / 2)) / (total / 2)
    latency = time(total) - rate * total
    ready = [max(end - span * layer / number for end, span in ends) for layer in range(number)]
    # Lowest layer that is in a bucket -> end of these buckets, and their layer counts.
    reached: dict[int, tuple[float, tuple[int, ...]]] = {number: (0.0, ())}
    options: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(MOST_BUCKETS):
        # The last bucket takes what is of no layer, too. That and its latency are left out: every option has them.
        options.append(
            min((max(at, ready[0]) + rate * below[low], (*buckets, low)) for low, (at, buckets) in reached.items())
        )
        reached = {
            low: min(
                (max(at, ready[low]) + latency + rate * (below[high] - below[low]), (*buckets, high - low))
                for high, (at, buckets) in reached.items()
                if high > low
            )
            for low in range(max(reached))
        }
        if not reached:
            break
    earliest, unsplit = min(options)[0], options[0][0]
    return next(buckets for at, buckets in options if at <= earliest + NEGLIGIBLE_GAIN * (unsplit - earliest))


def finish(buckets: Sequence[Bucket], layers: int, ends: Ends, time: Callable[[float], float]) -> float:
    """The end of the last bucket in ms. A bucket starts after the one before and after the last rank has reached it."""
    now = 0.0
    for bucket in buckets:
        remaining = remaining_backward(bucket, layers)
        now = max(now, max(end - span * remaining for end, span in ends)) + time(bucket.size)
    return now


def can_reverse(module: Module) -> bool:
    """Whether the plan may be reversed in time: no cascade reads another."""
    return all(cascade.phase is Phase.TRAIN and not cascade.inputs for cascade in module.cascades)


def time_reversed(module: Module) -> Module:
    """The plan reversed in time: the same ranks, durations and makespan."""
    last = max((cascade.end for cascade in module.cascades), default=0.0)
    cascades = tuple(
        cascade.with_attrs(start=Quantity(last - cascade.end, "ms"), end=Quantity(last - cascade.start, "ms"))
        for cascade in module.cascades
    )
    return replace(module, cascades=cascades)


def last_backwards(module: Module, stage: Stage, ranks: Sequence[int]) -> list[tuple[float, float]]:
    """Per rank: the end of its last cascade in ms, and the ms of that cascade's backward, or of what a split one left
    for the end, if reduces may overlap it."""
    last: dict[int, Cascade] = {}
    for cascade in global_order(module.cascades):
        last.update(dict.fromkeys(cascade.ranks, cascade))
    ends = []
    for rank in ranks:
        if rank not in last:
            ends.append((0.0, 0.0))
            continue
        cascade = last[rank]
        inside = cascade.phase in (Phase.TRAIN, *GRADIENT) and cascade.stage == stage.name
        inside = inside and all(last[member] is cascade for member in cascade.ranks)
        forward = forward_share(cascade, stage) if cascade.phase is Phase.TRAIN else 0.0
        share = 1 - forward if inside else 0.0
        ends.append((cascade.end, share * (cascade.end - cascade.start)))
    return sorted(set(ends))
