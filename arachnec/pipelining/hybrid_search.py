"""Find a hybrid plan: DAPPLE's dynamic program, ours, and PipeDream's partition.

The state is how many layers are placed, and how many devices of every machine are taken; the three placement policies
say which devices the next stage may get; on few devices our program looks at every placement. DAPPLE's program keeps
the plan with the smallest block for each state. Ours keeps every plan that another does not beat in block, transfers
and exposed all-reduce together, so that what is left at the end is the plan of least latency.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from arachnec.pipelining.errors import fits_nowhere
from arachnec.pipelining.hybrid_plan import (
    Allocation,
    HybridPlan,
    Instance,
    Stage,
    allocations,
    every_allocation,
    hybrid_plan,
)

SLACK = 1e-9  # relative: what rounding may do to a comparison
EXACT = 20_000  # partial plans looked at (1 s) before a gain must be worth its search
SMALL = 8  # devices of a cluster of which every placement is looked at, not those of the policies alone
GAIN = 0.01  # of the latency: from then on, a plan that gains less is not looked for


@dataclass(frozen=True)
class _Copies:
    """One pipeline of several: how many there are, and the machines that one has."""

    pipelines: int
    apart: bool
    machines: int
    devices: int


@dataclass(frozen=True)
class _Partial:
    """Stages for the first layers. ``longest`` and ``sends`` in ms of the whole batch; all-reduces as (stage, ms)."""

    stages: tuple[Stage, ...]
    used: Allocation
    longest: float
    sends: float
    reduces: tuple[tuple[int, float], ...]


def dapple_plan(instance: Instance, pipelines: Sequence[int] = (1,)) -> HybridPlan:
    """The published dynamic program: of all cuts, replicas and placements by policy, the smallest block.

    Its latency may be far above the best. Between the ``pipelines``, numbers of copies, the latency decides.
    ValueError if none of them divides batch and cluster; UserError if no plan fits the memory.
    """
    chosen = [(copies, _smallest_block(instance, copies)) for copies in _copies(instance, pipelines)]
    plans = [hybrid_plan(instance, stages, copies.pipelines, copies.apart) for copies, stages in chosen if stages]
    if chosen and not plans:
        raise fits_nowhere(instance.layers, instance.machines.count * instance.machines.devices)
    return min(plans, key=lambda plan: plan.latency)


def best_plan(instance: Instance, pipelines: Sequence[int] = (1,)) -> HybridPlan:
    """The least latency over all cuts, replicas and ``pipelines``, placed by policy, on few devices in any way."""
    every = list(_copies(instance, pipelines))
    known = [hybrid_plan(instance, stages, c.pipelines, c.apart) for c in every for stages in _even(instance, c)]
    if 1 in pipelines:
        partition = pipedream_plan(instance)
        known += [partition] if all(instance.fits(stage.first, stage.last) for stage in partition.stages) else []
    best = min(known, key=lambda plan: plan.latency) if known else dapple_plan(instance, pipelines)
    for copies in every:
        best = _least_latency(instance, copies, best)
    return best


def pipedream_plan(instance: Instance) -> HybridPlan:
    """PipeDream's partition (1806.03377, section 3.1), run by the synchronous schedule.

    It balances one micro-batch's time, or its all-reduce where that is longer, and the transfers, and knows nothing of
    fill and drain. Devices are taken machine by machine.
    """
    import numpy as np  # `arachnec passes` answers without it

    machines, layers = instance.machines, instance.layers
    count = machines.count * machines.devices
    m = instance.batch // instance.micro_batch
    replicas = np.arange(1.0, count + 1)[:, None]
    until, parameters = np.array(instance.until), np.array(instance.parameters, dtype=float)
    crossing = (2e3 * cut * instance.batch / instance.profile_batch for cut in instance.profile.cuts)
    sent = np.array([0.0, *(transfer / machines.send / m for transfer in crossing)])
    # least[i, n]: the bottleneck of the first i layers on n devices; plans[i, n]: their (last, replicas)
    least = np.full((layers + 1, count + 1), math.inf)
    least[0, 0] = 0.0
    plans: dict[tuple[int, int], tuple[tuple[int, int], ...]] = {(0, 0): ()}
    for last in range(1, layers + 1):
        reduce = 2e3 * (replicas - 1) * (parameters[last] - parameters[:last]) / machines.reduce
        own = np.maximum(np.maximum((until[last] - until[:last]) / m, reduce) / replicas, sent[:last])
        for n in range(1, count + 1):
            bottleneck = np.maximum(least[:last, n - 1 :: -1].T, own[:n])  # by replicas and first layer
            fewer, first = divmod(int(bottleneck.argmin()), last)
            least[last, n] = bottleneck[fewer, first]
            plans[last, n] = (*plans[first, n - fewer - 1], (last, fewer + 1))
    _, parts = min((least[ended], parts) for ended, parts in plans.items() if ended[0] == layers)
    used: Allocation = (0,) * machines.count
    stages: list[Stage] = []
    for last, shared in parts:
        devices = _filled(used, machines.devices, shared)
        stages.append(Stage(stages[-1].last if stages else 0, last, devices))
        used = _sum(used, devices)
    return hybrid_plan(instance, tuple(stages))


def _copies(instance: Instance, wanted: Sequence[int]) -> Iterator[_Copies]:
    """Those numbers of pipelines that divide batch and cluster: on machines of their own, or inside every machine."""
    machines, devices = instance.machines.count, instance.machines.devices
    for pipelines in wanted:
        if instance.micro_batches(pipelines) is None:
            continue
        if machines % pipelines == 0:
            yield _Copies(pipelines, pipelines > 1, machines // pipelines, devices)
        if devices % pipelines == 0 and pipelines > 1:
            yield _Copies(pipelines, False, machines, devices // pipelines)


def _even(instance: Instance, copies: _Copies) -> Iterator[tuple[Stage, ...]]:
    """Plans of stages on equally many devices, taken in order, cut where the work of each is nearest to its share."""
    count = copies.machines * copies.devices
    for stages in range(1, min(count, instance.layers) + 1):
        if count % stages:
            continue
        shares = [instance.total * stage / stages for stage in range(1, stages)]
        cuts = [bisect_left(instance.until, share) for share in shares]
        ends = [max(stage, min(cut, instance.layers - stages + stage)) for stage, cut in enumerate(cuts, 1)]
        used: Allocation = (0,) * copies.machines
        plan: list[Stage] = []
        for first, last in pairwise([0, *ends, instance.layers]):
            devices = _filled(used, copies.devices, count // stages)
            used = _sum(used, devices)
            plan.append(Stage(first, last, devices))
        if all(stage.first < stage.last and instance.fits(stage.first, stage.last) for stage in plan):
            yield tuple(plan)


def _smallest_block(instance: Instance, copies: _Copies) -> tuple[Stage, ...]:
    """DAPPLE's program over growing numbers of layers; no stages where none fit."""
    none: Allocation = (0,) * copies.machines
    states: list[dict[tuple[Allocation, Allocation], _Partial]] = [{} for _ in range(instance.layers)]
    states[0][none, none] = _Partial((), none, 0.0, 0.0, ())
    chosen: tuple[Stage, ...] = ()
    bound = math.inf
    if instance.fits(0, instance.layers):
        chosen = (Stage(0, instance.layers, (copies.devices,) * copies.machines),)
        bound = instance.total / (copies.machines * copies.devices * copies.pipelines)
    for placed, partials in enumerate(states):
        for partial in partials.values():
            for longer in _next(instance, copies, partial, placed, bound, every=False):
                stage = longer.stages[-1]
                if stage.last == instance.layers:
                    if longer.longest < bound:
                        bound, chosen = longer.longest, longer.stages
                    continue
                key = (longer.used, stage.devices)
                other = states[stage.last].get(key)
                if other is None or longer.longest < other.longest:
                    states[stage.last][key] = longer
    return chosen


def _least_latency(instance: Instance, copies: _Copies, best: HybridPlan) -> HybridPlan:
    """The best plan with these copies, or ``best``: to the last digit, or in a large space to within ``GAIN``."""
    m = instance.micro_batches(copies.pipelines)
    assert m is not None, "copies are of whole micro-batches"
    way = instance.total / (copies.pipelines * m)
    deep = _deep(instance, copies, m)
    every = copies.machines * copies.devices <= SMALL
    none: Allocation = (0,) * copies.machines
    states: list[dict[tuple[Allocation, Allocation], list[_Partial]]] = [{} for _ in range(instance.layers)]
    states[0][none, none] = [_Partial((), none, 0.0, 0.0, ())]

    looked_at = 0

    def most_latency() -> float:
        """The latency from which on a plan is not worth looking for."""
        return best.latency * (1 + SLACK if looked_at < EXACT else 1 - GAIN)

    def most_block() -> float:
        """The largest block times m with which a plan can still be better."""
        return (most_latency() - way) * m / (m - 1) * (1 + SLACK) if m > 1 else math.inf

    for placed in range(instance.layers):
        for partials in states[placed].values():
            for partial in partials:
                for longer in _next(instance, copies, partial, placed, most_block(), every=every):
                    looked_at += 1
                    stage = longer.stages[-1]
                    if stage.last == instance.layers:
                        plan = hybrid_plan(instance, longer.stages, copies.pipelines, copies.apart)
                        best = min(best, plan, key=lambda plan: plan.latency)
                        continue
                    sends = longer.sends / (copies.pipelines * m)
                    if _least(instance, copies, longer, m) + way + sends < most_latency():
                        _keep(states[stage.last].setdefault((longer.used, stage.devices), []), longer, m, deep)
        states[placed].clear()
    return best


def _least(instance: Instance, copies: _Copies, partial: _Partial, m: int) -> float:
    """ms of all blocks but one and of what sticks out of the all-reduces, at least, whatever stages follow.

    The layers left share the devices left. What sticks out of one of the first m stages' all-reduces shrinks with a
    larger block no faster than the blocks before it grow.
    """
    free = copies.machines * copies.devices - sum(partial.used)
    left = instance.total - instance.until[partial.stages[-1].last]
    if not free:
        return math.inf
    block = max(partial.longest, left / (free * copies.pipelines)) / m
    return block * (m - 1) + max(0.0, *(reduce - i * block for i, reduce in partial.reduces if i < m))


def _deep(instance: Instance, copies: _Copies, m: int) -> bool:
    """Whether a stage behind the first m may have an all-reduce that m blocks do not hide.

    m blocks are the longest stage, which takes at least an even share of the work.
    """
    machines, count = instance.machines, copies.machines * copies.devices
    reduce = 2e3 * instance.parameters[-1] / min(machines.reduce, machines.inside)
    return count > m and reduce > instance.total / (count * copies.pipelines)


def _next(
    instance: Instance, copies: _Copies, partial: _Partial, placed: int, most: float, *, every: bool
) -> Iterator[_Partial]:
    """One stage more, of any length, no longer than ``most``, on any number of devices: by every policy, or ``every``
    placement."""
    before = partial.stages[-1].devices if partial.stages else partial.used
    free = copies.machines * copies.devices - sum(partial.used)
    for replicas in range(1, free + 1):
        shared = replicas * copies.pipelines
        placements = every_allocation(partial.used, before, copies.devices, replicas) if every else ()
        for devices in placements or allocations(partial.used, copies.devices, replicas):
            sent = instance.send(placed - 1, partial.stages[-1].devices, devices) if partial.stages else 0.0
            if 2 * sent > most:
                continue
            left = (free - replicas) * copies.pipelines  # the rest must have room on what is left
            first = bisect_left(instance.until, instance.total - most * left * (1 + SLACK)) if left else instance.layers
            for last in range(max(placed + 1, first), instance.layers + 1):
                length = instance.time(placed, last) / shared
                if length > most or not instance.fits(placed, last):
                    break
                stage = Stage(placed, last, devices)
                reduce = (len(partial.stages), instance.all_reduce(stage, copies.pipelines, copies.apart))
                yield _Partial(
                    (*partial.stages, stage),
                    _sum(partial.used, devices),
                    max(partial.longest, length, 2 * sent),
                    partial.sends + sent,
                    (*partial.reduces, reduce),
                )


def _keep(partials: list[_Partial], new: _Partial, m: int, deep: bool) -> None:
    """Add the new one where none beats it, and drop those that it beats."""
    if not any(_beats(old, new, m, deep) for old in partials):
        partials[:] = [old for old in partials if not _beats(new, old, m, deep)]
        partials.append(new)


def _beats(a: _Partial, b: _Partial, m: int, deep: bool) -> bool:
    """Whether whatever ends ``b`` ends ``a`` at least as early.

    The stages that follow count from the number of those before: more stages hide their all-reduces better. Where a
    stage behind the first m has a long all-reduce (``deep``) a larger block may be the better one, as it hides more
    than it costs.
    """
    if a.longest > b.longest or a.sends > b.sends or len(a.stages) < len(b.stages):
        return False
    if deep and a.longest < b.longest:
        return False
    block = b.longest / m
    return all(
        reduce <= i * block or any(k <= i and other - k * block >= reduce - i * block for k, other in b.reduces)
        for i, reduce in a.reduces
    )


def _filled(used: Allocation, devices: int, count: int) -> Allocation:
    """Devices in order."""
    taken = []
    for there in used:
        own = min(count, devices - there)
        taken.append(own)
        count -= own
    return tuple(taken)


def _sum(a: Allocation, b: Allocation) -> Allocation:
    return tuple(x + y for x, y in zip(a, b, strict=True))
