"""The figures of a plan, as every ``--json`` report has them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from arachnec.backends.simulator import Simulation
from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Cascade, Level, Module, Phase, quantity
from arachnec.ir.sampling import (
    arrival_of,
    is_sampling,
    judged_ms,
    latencies_of,
    mean,
    objective_of,
    percentile,
    planned_steps,
    segment_of,
)
from arachnec.ir.stage_sizes import gib
from arachnec.ir.tensor_parallel import divided_encoders
from arachnec.planning.pipeline_places import stage_places
from arachnec.planning.sparse_stages import sparse_summaries
from arachnec.views.timeline import planned


def plan_report(module: Module, planning_ms: float) -> dict[str, Any]:
    """What a scheduled, placed or lowered module predicts; ms, GiB, and plain fractions.

    No schedule of these cascades goes below ``bound_ms``. ``area_bound_ms`` is what work over GPUs and the longest
    chain alone say; Z3 may exclude more, up to the makespan itself where that is proved optimal. ``gap`` is
    makespan / bound - 1. Where requests are planned for another ``objective``, bounds and gap are of that.

    ``tensor_parallel`` has the encoders whose weights are divided by width, and over how many ranks.

    ``attention`` of a cascade is the kernel family that its forward names, null where the run chooses.

    ``imbalance`` is the mean over ranks of (t_max - t) / t_max, t being the time that a rank is busy.
    """
    makespan, bound = quantity(module.attrs["makespan"]), quantity(module.attrs["bound"])
    area_bound = module.attrs.get("area_bound")
    ends = {cascade.name: cascade.end for cascade in module.cascades}
    lowered = module.level is Level.LOWERED  # only then is it known which all-reduces hide behind the last backwards
    cost = CostModel(module)
    steps = [step for program in module.programs for step in program.instructions]
    families = {step.target: step.attrs.get("attention") for step in steps if step.op == "forward"}
    return {
        "makespan_ms": makespan,
        "iteration_ms": planned(module).end if lowered else makespan + synchronisation_ms(module, cost),
        "bound_ms": bound,
        "area_bound_ms": quantity(area_bound) if area_bound is not None else bound,
        "gap": judged_ms(module, ends, makespan) / bound - 1 if bound > 0 else 0.0,
        "proved_optimal": module.attrs["proved"] is True,
        "imbalance": imbalance(busy_ms(module)),
        "planning_ms": planning_ms,
        "peak_memory_gib": peak_memory(module, cost),
        "layout": module.attrs.get("layout"),
        "layouts": alternatives(module),
        "tensor_parallel": divided_encoders(module),
        "sparse": [
            {
                "stage": summary.stage.name,
                "layers": summary.sparse,
                "predicted_density": summary.density,
                "predicted_by_class": {str(tokens): density for tokens, density in summary.classes.items()},
                "cascades": len(summary.chosen),
                "dense_cascades": len(summary.dense),
                "head_imbalance": summary.imbalance,
            }
            for summary in sparse_summaries(module)
        ],
        "cascades": [
            {
                "name": cascade.name,
                "stage": cascade.stage,
                "phase": cascade.phase.value,
                "degree": cascade.degree,
                "start_ms": cascade.start,
                "end_ms": cascade.end,
                "ranks": list(cascade.ranks) if module.level >= Level.PLACED else [],
                "recompute": cost.recomputed(cascade),
                **sampled(cascade),
                "attention": families.get(cascade.name, cascade.attrs.get("attention")),
            }
            for cascade in module.cascades
        ],
    } | request_report(module, ends)


def sampled(cascade: Cascade) -> dict[str, Any]:
    """Of a segment its first and last step, those it is planned to take, and how many branches lie side by side."""
    if cascade.phase is not Phase.DENOISE:
        return {}
    own = {"steps": list(segment_of(cascade)), "planned_steps": planned_steps(cascade), "side": cascade.side}
    return own | ({"unconditional": list(other)} if (other := cascade.unconditional) else {})


def alternatives(module: Module) -> list[dict[str, Any]]:
    """The layouts that the choice was between (``passes.choose_layout``): the simulated ms of a sample, or its lower
    bound where that was enough to leave it; neither where a clip does not fit. None where there was no choice."""

    def pairs(name: str) -> list[tuple[str, float]]:
        value = module.attrs.get(name)
        pairs = value if isinstance(value, tuple) else ()
        return [(str(pair[0]), quantity(pair[1])) for pair in pairs if isinstance(pair, tuple)]

    refused = module.attrs.get("refused")
    return [
        *({"layout": name, "simulated_ms": ms, "at_least_ms": None} for name, ms in pairs("tried")),
        *({"layout": name, "simulated_ms": None, "at_least_ms": ms} for name, ms in pairs("excluded")),
        *(
            {"layout": str(name), "simulated_ms": None, "at_least_ms": None}
            for name in (refused if isinstance(refused, tuple) else ())
        ),
    ]


def simulation_report(module: Module, simulation: Simulation, planning_ms: float = 0.0) -> dict[str, Any]:
    """The keys of every report, with what the simulation came to in the place of the plan's times."""
    report = plan_report(module, planning_ms)
    spans: dict[str, tuple[float, float]] = {}
    for interval in simulation.timeline.intervals:
        start, end = spans.get(interval.target, (interval.start, interval.end))
        spans[interval.target] = (min(start, interval.start), max(end, interval.end))
    for row in report["cascades"]:
        row["start_ms"], row["end_ms"] = spans[row["name"]]
    ends = {name: end for name, (_, end) in spans.items()}
    judged = judged_ms(module, ends, simulation.makespan_ms)
    report |= request_report(module, ends)
    return report | {
        "makespan_ms": simulation.makespan_ms,
        "iteration_ms": simulation.iteration_ms,
        "gap": judged / report["bound_ms"] - 1 if report["bound_ms"] > 0 else 0.0,
        "imbalance": simulation.imbalance,
        "peak_memory_gib": max(simulation.peak_memory_gib, default=0.0),
        "mfu": simulation.mfu,
        "ranks": [
            {"rank": program.rank, "busy_ms": busy, "idle_ms": idle, "peak_memory_gib": memory}
            for program, busy, idle, memory in zip(
                module.programs, simulation.busy_ms, simulation.idle_ms, simulation.peak_memory_gib, strict=True
            )
        ],
    }


def imbalance(loads: Sequence[float]) -> float:
    """Mean over ranks of (t_max - t_rank) / t_max; 0 where nothing runs."""
    longest = max(loads, default=0.0)
    if longest <= 0:
        return 0.0
    return math.fsum((longest - load) / longest for load in loads) / len(loads)


def busy_ms(module: Module) -> list[float]:
    """ms that each rank is in a cascade; for a module without ranks, all the same."""
    assert module.cluster is not None
    world = module.cluster.world
    if module.level < Level.PLACED:
        total = math.fsum((cascade.end - cascade.start) * cascade.width for cascade in module.cascades)
        return [total / world] * world
    loads = [0.0] * world
    for cascade in module.cascades:
        for rank in cascade.ranks:
            loads[rank] += cascade.end - cascade.start
    return loads


def synchronisation_ms(module: Module, cost: CostModel) -> float:
    """ms of the gradient all-reduces and the optimizer's steps, one after another behind the last cascade.

    Stages of a pipeline on other ranks than each other's do theirs at the same time.
    """
    places, by_place = stage_places(module), defaultdict[tuple[int, ...], float](float)
    for stage in module.stages:
        if stage.trained:
            ranks = places[stage.name]
            by_place[ranks] += cost.reduce_time(stage, ranks) + cost.step_time(stage)
    return max(by_place.values(), default=0.0)


def peak_memory(module: Module, cost: CostModel) -> float:
    """GiB of the fullest rank: what it always holds, communicators included, and the most that one cascade adds."""
    if is_sampling(module) and module.level >= Level.PLACED:
        return max(sampling_memory(module, cost).values(), default=0.0)
    always = cost.resident + cost.prepared + cost.communicators
    return always + max((cascade_memory(cascade, cost) for cascade in module.cascades), default=0.0)


def cascade_memory(cascade: Cascade, cost: CostModel) -> float:
    """GiB that each of its ranks holds while it runs: as it says, else as its stage's formulas do."""
    if (stated := cascade.attrs.get("memory")) is not None:
        return quantity(stated)
    return cost.memory(cascade, cascade.even_width, cost.recomputed(cascade), cascade.side)


def sampling_memory(module: Module, cost: CostModel) -> dict[int, float]:
    """GiB of every rank that runs anything: the stages that it runs, and the most that one of their cascades adds."""
    stages: dict[int, set[str]] = defaultdict(set)
    most: dict[int, float] = defaultdict(float)
    for cascade in module.cascades:
        memory = cascade_memory(cascade, cost)
        for rank in cascade.ranks:
            stages[rank].add(cascade.stage)
            most[rank] = max(most[rank], memory)
    held = {name: gib(stage.attrs.get("state")) for name, stage in cost.stages.items()}
    return {
        rank: cost.communicators + most[rank] + math.fsum(held[name] for name in own) for rank, own in stages.items()
    }


def request_report(module: Module, ends: Mapping[str, float]) -> dict[str, Any]:
    """Of a module that samples: every request's latency, ms from its arrival to the end of its last cascade, and their
    mean and 95th percentile. ``ends`` are those of cascades. Empty for others."""
    if not is_sampling(module):
        return {}
    latencies = latencies_of(module, ends)
    rows = [
        {
            "id": clip.attrs.get("name", str(clip.id)),
            "arrival_ms": arrival_of(clip),
            "end_ms": arrival_of(clip) + latencies[clip.id],
            "latency_ms": latencies[clip.id],
        }
        for clip in module.clips
        if clip.id in latencies
    ]
    return {
        "objective": objective_of(module),
        "requests": rows,
        "mean_latency_ms": mean(list(latencies.values())),
        "p95_latency_ms": percentile(list(latencies.values())),
    }


def clips_trained(module: Module) -> Counter[int]:
    """How often each clip of the module is trained; by a pipeline, as often as it goes through the last stage.

    Of requests, how often each is sampled: `check` has proved that its segments take every step once.
    """
    if is_sampling(module):
        return Counter(
            {clip for cascade in module.cascades if cascade.phase is Phase.DENOISE for clip in cascade.clips}
        )
    last = next((stage.name for stage in reversed(module.stages) if "part_of" in stage.attrs), None)
    counted = (c for c in module.cascades if c.phase is Phase.TRAIN or (c.stage, c.phase) == (last, Phase.FORWARD))
    return Counter(clip for cascade in counted for clip in cascade.clips)
