"""Buckets of gradients: cut every stage's all-reduce so that most of it runs beside the last backwards.

A backward goes from the last layer to the first; the gradients of a run of layers are whole once the last backward on
a rank has passed it. Summed bucket by bucket (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3), all but the
last bucket may be through when the last backward ends. Small buckets start early and pay their latency each; how large
they are is decided by the cost model on this very plan, because only a sum that every rank has come to can proceed.

A gradient is whole in the *last* backward of its rank only, and schedulers end with the shortest cascades. A plan in
which no cascade reads another may as well run from its end to its beginning: then every rank ends with what it would
have begun with, a long cascade for the sums to hide behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from arachnec.cost.model import CostModel
from arachnec.ir.gradient_buckets import Contents, contents, layers_of, passed
from arachnec.ir.nodes import Cascade, Cluster, Module, Phase, Reduce, Stage, integers
from arachnec.ir.stage_sizes import gradient_bytes, gradient_element_bytes
from arachnec.ir.values import Quantity
from arachnec.lowering.order import forward_share, global_order

MIB = 2**20

MOST = 8  # buckets: each is an instruction on every rank

WORTH = 0.01  # of what the best buckets gain: so much less is as good, with fewer of them


def with_buckets(module: Module, mib: int | None = None, turn: bool = True) -> Module:
    """A placed module whose reductions say their buckets; with ``turn`` in the direction of time that ends first."""
    assert module.cluster is not None
    plans = [module, *([turned(module)] if turn and can_turn(module) else [])]
    cost = CostModel(module)
    bucketed = [_bucketed(plan, module.cluster, cost, mib) for plan in plans]
    return min(bucketed, key=lambda found: found[0])[1]


def _bucketed(module: Module, cluster: Cluster, cost: CostModel, mib: int | None) -> tuple[float, Module]:
    """When the last bucket is through, ms, and the module with its buckets."""
    cuts = [_cut(module, cluster, cost, node, mib) for node in module.reductions]
    through = max((at for at, _ in cuts), default=0.0)
    return through, replace(module, reductions=tuple(node for _, node in cuts))


def _cut(module: Module, cluster: Cluster, cost: CostModel, node: Reduce, mib: int | None) -> tuple[float, Reduce]:
    stage = module.stage(node.stage)
    ranks = integers(node.attrs.get("ranks", tuple(range(cluster.world))))
    if not layers_of(stage) or len(ranks) < 2 or "bytes" in node.attrs or "time" in node.attrs:
        return 0.0, node

    def time(size: float) -> float:
        return cost.reduce_time(stage, ranks, size)

    ends = last_backwards(module, stage, ranks)
    buckets = best_buckets(stage, ends, time) if mib is None else cut(stage, mib * MIB)
    through = finish(contents(stage, buckets), len(layers_of(stage)), ends, cache(time))
    return through, replace(node, attrs=node.attrs.updated(buckets=buckets)) if len(buckets) > 1 else node


def cut(stage: Stage, size: float) -> tuple[int, ...]:
    """Runs of layers from the last one of at least ``size`` bytes each; what is left over goes with the rest."""
    each = gradient_element_bytes(stage)
    buckets: list[int] = []
    held, count = 0.0, 0
    for _, parameters in reversed(layers_of(stage)):
        held, count = held + parameters * each, count + 1
        if held >= size:
            buckets.append(count)
            held, count = 0.0, 0
    return (*buckets, count)


Ends = Sequence[tuple[float, float]]


def best_buckets(stage: Stage, ends: Ends, time: Callable[[float], float]) -> tuple[int, ...]:
    """The fewest buckets whose last is through about as early as that of any ``MOST`` buckets.

    ``ends`` says for every rank when its last backward ends, and how long before that its first gradients are whole;
    ``time`` how long a sum of so many bytes takes, a latency and a rate. All in ms.

    By dynamic programming over the lowest layer of the newest bucket: the earlier the buckets of the layers above it
    are through, the earlier is what follows.
    """
    sizes = [count * gradient_element_bytes(stage) for _, count in layers_of(stage)]
    number, total = len(sizes), gradient_bytes(stage)
    above = [sum(sizes[layer:]) for layer in range(number + 1)]  # bytes from this layer on
    rate = (time(total) - time(total / 2)) / (total / 2)
    latency = time(total) - rate * total
    ready = [max(end - span * layer / number for end, span in ends) for layer in range(number + 1)]
    # For the lowest layer that buckets of layers alone have come to: when they are through, and what they are.
    reached: dict[int, tuple[float, tuple[int, ...]]] = {number: (0.0, ())}
    options: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(MOST):
        options.append(
            min(
                (max(at, ready[0]) + latency + rate * (total - above[low]), (*buckets, low))
                for low, (at, buckets) in reached.items()
            )
        )
        reached = {
            low: min(
                (max(at, ready[low]) + latency + rate * (above[low] - above[high]), (*buckets, high - low))
                for high, (at, buckets) in reached.items()
                if high > low
            )
            for low in range(max(reached))
        }
        if not reached:
            break
    least, whole = min(options)[0], options[0][0]
    return next(buckets for at, buckets in options if at <= least + WORTH * (whole - least))


def finish(buckets: Sequence[Contents], layers: int, ends: Ends, time: Callable[[float], float]) -> float:
    """When the last bucket is through: each after the one before, and after the last rank has come to it."""
    now = 0.0
    for bucket in buckets:
        now = max(now, max(end - span * passed(bucket, layers) for end, span in ends)) + time(bucket.size)
    return now


def can_turn(module: Module) -> bool:
    """Whether the cascades are free of order: each trains by itself, from nothing that another makes."""
    return all(cascade.phase is Phase.TRAIN and not cascade.inputs for cascade in module.cascades)


def turned(module: Module) -> Module:
    """The plan from its end to its beginning: every cascade on its ranks for its time, and the same makespan."""
    last = max((cascade.end for cascade in module.cascades), default=0.0)
    cascades = tuple(
        cascade.with_attrs(start=Quantity(last - cascade.end, "ms"), end=Quantity(last - cascade.start, "ms"))
        for cascade in module.cascades
    )
    return replace(module, cascades=cascades)


def last_backwards(module: Module, stage: Stage, ranks: Sequence[int]) -> list[tuple[float, float]]:
    """For each rank the end of its last cascade, and the ms of that cascade's backward if sums may start inside it."""
    last: dict[int, Cascade] = {}
    for cascade in global_order(module.cascades):
        last.update(dict.fromkeys(cascade.ranks, cascade))
    found = []
    for rank in ranks:
        if rank not in last:
            found.append((0.0, 0.0))
            continue
        cascade = last[rank]
        inside = cascade.phase is Phase.TRAIN and cascade.stage == stage.name
        inside = inside and all(last[member] is cascade for member in cascade.ranks)
        share = 1 - forward_share(cascade, stage) if inside else 0.0
        found.append((cascade.end, share * (cascade.end - cascade.start)))
    return sorted(set(found))
