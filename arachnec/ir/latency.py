"""What a plan of requests is judged by: its makespan, or the mean or 95th percentile of their latencies.

A request's latency is the time from its arrival to the end of its last cascade.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Literal, cast, get_args

from arachnec.ir.nodes import Module
from arachnec.ir.sampling import arrival_of

Objective = Literal["makespan", "mean-latency", "p95-latency"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)
PART = 0.95


def objective_of(module: Module) -> Objective:
    """What its plan was made for, and its bound is one of."""
    return cast(Objective, str(module.attrs.get("objective", "makespan")))


def objective_ms(module: Module, ends: Mapping[str, float], objective: Objective | None = None) -> float:
    """The objective's value at these ends of cascades, in ms."""
    objective = objective or objective_of(module)
    if objective == "makespan":
        return max(ends.values(), default=0.0)
    latencies = list(latencies_of(module, ends).values())
    return mean(latencies) if objective == "mean-latency" else percentile(latencies)


def judged_ms(module: Module, ends: Mapping[str, float], makespan: float) -> float:
    """What the module's bound is of: its objective at these ends of cascades, or this makespan."""
    return makespan if objective_of(module) == "makespan" else objective_ms(module, ends)


def latencies_of(module: Module, ends: Mapping[str, float]) -> dict[int, float]:
    """ms of each request that has cascades, in the module's order; ``ends`` are those of cascades."""
    last: dict[int, float] = {}
    for cascade in module.cascades:
        for clip in cascade.clips:
            last[clip] = max(last.get(clip, 0.0), ends[cascade.name])
    return {clip.id: last[clip.id] - arrival_of(clip) for clip in module.clips if clip.id in last}


def mean(values: Sequence[float]) -> float:
    """0 of none."""
    return math.fsum(values) / max(1, len(values))


def percentile(values: Sequence[float], part: float = PART) -> float:
    """The least value that so large a part of them does not exceed; 0 of none."""
    return sorted(values)[math.ceil(part * len(values)) - 1] if values else 0.0
