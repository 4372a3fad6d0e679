"""What a plan of a pipeline costs on every rank, and what it suffers from most (AdaPtis, 2509.23722, section 4).

A plan is a partition of layers into stages, a placement of stages on ranks, and a schedule. The times are those of the
exact evaluation; the model takes them apart: compute, memory, communication, what of it is exposed, and the bubble.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Literal

from arachnec.pipelining.action import PipelineSchedule
from arachnec.pipelining.evaluate import StageTimes, evaluate, held
from arachnec.pipelining.order_problem import OrderProblem

Bottleneck = Literal["memory", "compute", "communication", "bubble"]


@dataclass(frozen=True)
class LayerCosts:
    """Of one micro-batch: times on a rank of speed 1; bytes ``saved`` for backward and ``output`` to the next layer.

    ``state`` are the bytes of parameters, gradients and optimizer.
    """

    forward: float
    activation_gradient: float
    weight_gradient: float
    saved: float = 0
    state: float = 0
    output: float = 0


@dataclass(frozen=True)
class PipelineInstance:
    """Layers in order, equal micro-batches, and ranks with a speed and a memory each.

    A transfer between ranks takes ``latency`` and its bytes over ``bandwidth``, in the unit of the layers' times.
    """

    layers: tuple[LayerCosts, ...]
    micro_batches: int
    speeds: tuple[float, ...]
    memory: tuple[float, ...]
    bandwidth: float = float("inf")
    latency: float = 0

    @property
    def ranks(self) -> int:
        return len(self.speeds)


@dataclass(frozen=True)
class PipelinePlan:
    """``sizes[stage]`` layers on rank ``placement[stage]``, in the order of the schedule."""

    sizes: tuple[int, ...]
    placement: tuple[int, ...]
    schedule: PipelineSchedule


@dataclass(frozen=True)
class Performance:
    """Per rank: time computing, bytes at most, time that its messages travel, time waiting.

    ``exposed`` is how much earlier the step would end if transfers were free; the rest of the communication is
    overlapped. ``bottleneck`` is what costs most, beside an even spread of the work over all ranks.
    """

    makespan: float
    compute: tuple[float, ...]
    memory: tuple[float, ...]
    communication: tuple[float, ...]
    bubble: tuple[float, ...]
    exposed: float
    bottleneck: Bottleneck


def order_problem(instance: PipelineInstance, sizes: Sequence[int], placement: Sequence[int]) -> OrderProblem:
    """Stages as their layers make them; what every rank may hold is its memory less the state of its layers."""
    count = instance.micro_batches
    ends = list(accumulate(sizes))
    stages = [instance.layers[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    speeds = [instance.speeds[rank] for rank in placement]

    def table(name: str) -> list[list[float]]:
        return [
            [sum(getattr(layer, name) for layer in stage) / speed] * count
            for stage, speed in zip(stages, speeds, strict=True)
        ]

    forward, activation_gradient, weight_gradient = map(table, ("forward", "activation_gradient", "weight_gradient"))
    sends = [[instance.latency + stage[-1].output / instance.bandwidth] * count for stage in stages[:-1]]
    free = not any(send[0] for send in sends)
    times = StageTimes(
        forward, activation_gradient, weight_gradient, None, () if free else sends, () if free else sends
    )
    saved = [[sum(layer.saved for layer in stage)] * count for stage in stages]
    limits = list(instance.memory)
    for stage, rank in zip(stages, placement, strict=True):
        limits[rank] -= sum(layer.state for layer in stage)
    return OrderProblem(times, saved, limits, tuple(placement))


def performance(instance: PipelineInstance, plan: PipelinePlan) -> Performance:
    problem = order_problem(instance, plan.sizes, plan.placement)
    evaluation = evaluate(plan.schedule, problem.times)
    activations = held(plan.schedule, problem.saved)
    states = [own - limit for own, limit in zip(instance.memory, problem.limits, strict=True)]
    memory = tuple(a + b for a, b in zip(activations, states, strict=True))
    communication = [0.0] * instance.ranks
    exposed = 0.0
    if problem.times.send_forward:
        for cut, (before, behind) in enumerate(pairwise(plan.placement)):
            if before != behind:
                communication[before] += sum(problem.times.send_forward[cut])
                communication[behind] += sum(problem.times.send_backward[cut])
        times = problem.times
        free = StageTimes(times.forward, times.activation_gradient, times.weight_gradient)
        exposed = evaluation.makespan - evaluate(plan.schedule, free).makespan
    overfull = any(most > own for most, own in zip(memory, instance.memory, strict=True))
    worst = bottleneck_of(evaluation.makespan, evaluation.busy, instance.speeds, exposed, overfull=overfull)
    return Performance(
        evaluation.makespan, evaluation.busy, memory, tuple(communication), evaluation.idle, exposed, worst
    )


def bottleneck_of(
    makespan: float, busy: Sequence[float], speeds: Sequence[float], exposed: float, *, overfull: bool
) -> Bottleneck:
    """What costs most: an uneven spread of the work, transfers that nothing hides, or the bubble; first the memory."""
    spread = sum(own * speed for own, speed in zip(busy, speeds, strict=True))
    busiest = max(busy)
    losses: dict[Bottleneck, float] = {
        "compute": busiest - spread / sum(speeds),
        "communication": exposed,
        "bubble": makespan - exposed - busiest,
    }
    return "memory" if overfull else max(losses, key=losses.__getitem__)
