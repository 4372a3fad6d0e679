"""Sampling, as a module says it: requests, steps of a ``denoise`` cascade, outcomes of a switch, the plan's measure.

A request is a clip with ``steps``. Its first model takes the steps before its switch, its second model the others. An
*outcome* is how many the first one takes: K. Of steps f to l a segment of the first model takes f to min(l, K - 1), one
of the second max(f, K) to l. What is left of neither hands its input on. A request's latency is the time from its
arrival to the end of its last cascade.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, cast, get_args

from arachnec.ir.nodes import Cascade, Clip, Module, Phase, integer, integers, quantity

CODING = (Phase.ENCODE, Phase.DECODE)  # phases in which ranks deal out whole clips


def is_sampling(module: Module) -> bool:
    """Whether its cascades sample: then every stage lies on the ranks of its cascades alone."""
    return any(cascade.phase is Phase.DENOISE for cascade in module.cascades)


def branches_of(cascade: Cascade) -> int:
    """Predictions of one step; 1 for what takes no steps."""
    return integer(cascade.attrs.get("branches", 1)) if cascade.phase is Phase.DENOISE else 1


def asked_branches(clip: Clip, model: int) -> int:
    """Predictions of one step that a request asks of the first model, 0, or of the second."""
    branches = integers(clip.attrs.get("branches", ()))
    return branches[model] if model < len(branches) else 1


def segment_of(cascade: Cascade) -> tuple[int, int]:
    """First and last step of a ``denoise``; one step where it does not say."""
    first, last = integers(cascade.attrs.get("steps", (0, 0)))
    return first, last


def planned_steps(cascade: Cascade) -> int:
    """How many forwards one after another a ``denoise`` is planned to run; 1 for every other phase."""
    if cascade.phase is not Phase.DENOISE:
        return 1
    first, last = segment_of(cascade)
    return integer(cascade.attrs.get("planned", last - first + 1))


def as_forward(cascade: Cascade) -> Cascade:
    """A ``denoise`` as its model's forward sees it: a clip for each prediction."""
    if cascade.phase is not Phase.DENOISE or (branches := branches_of(cascade)) == 1:
        return cascade
    return replace(cascade, batch=cascade.batch * branches, attrs=cascade.attrs.updated(branches=None))


def on_one_side(cascade: Cascade, side: int) -> Cascade:
    """What the ranks of one of ``side`` clips run, or of one share of the clips; of a ``denoise`` of the branches."""
    if side == 1:
        return cascade
    if cascade.phase is Phase.DENOISE:
        return cascade.with_attrs(branches=branches_of(cascade) // side)
    return replace(cascade, batch=cascade.batch // side)


def models_of(module: Module) -> tuple[str, ...]:
    """The stages that denoise, in the order in which they take over."""
    named = module.attrs.get("models")
    return tuple(map(str, named)) if isinstance(named, tuple) else ()


def outcomes_of(clip: Clip) -> range:
    """Every K that a request's switch may come to; all of its steps where there is no switch."""
    steps = integer(clip.attrs.get("steps", 0))
    least, most = integers(clip.attrs.get("window", (steps, steps)))
    return range(least, most + 1)


def forecast_of(clip: Clip) -> int:
    """The K that is planned for."""
    return integer(clip.attrs.get("forecast", outcomes_of(clip)[-1]))


def steps_taken(segment: tuple[int, int], after: bool, outcome: int) -> range:
    """The steps that a segment of the first model takes at an outcome; with ``after`` one of the second."""
    first, last = segment
    return range(max(first, outcome), last + 1) if after else range(first, min(last + 1, outcome))


def arrival_of(clip: Clip) -> float:
    """ms before which nothing of a request runs."""
    return quantity(clip.attrs["arrival"]) if "arrival" in clip.attrs else 0.0


def arrivals(clips: Sequence[Clip], cascades: Sequence[Cascade]) -> dict[str, float]:
    """By cascade, ms before which it does not run; those that may run from the start left out."""
    late = {clip.id: arrival_of(clip) for clip in clips if "arrival" in clip.attrs}
    own = ((c.name, max((late.get(clip, 0.0) for clip in c.clips), default=0.0)) for c in cascades if late)
    return {name: moment for name, moment in own if moment > 0}


def chain_of(cascades: Sequence[Cascade], request: int) -> list[Cascade]:
    """The segments of a request in the order in which they hand on its latents, as far as they form a chain."""
    own = {c.name: c for c in cascades if c.phase is Phase.DENOISE and request in c.clips}
    behind = {name: c for c in own.values() for name in c.inputs if name in own}
    chain = [c for c in own.values() if not any(name in own for name in c.inputs)][:1]
    while chain and len(chain) < len(own) and chain[-1].name in behind:
        chain.append(behind[chain[-1].name])
    return chain


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
