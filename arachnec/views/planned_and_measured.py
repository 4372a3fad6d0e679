"""What differs between a plan and a run of it, in sentences, and where the plan's costs come from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from arachnec.ir.nodes import Module
from arachnec.views.format import ms
from arachnec.views.timeline import COMPUTE, Timeline

FACTOR = 2.0  # between planned and measured, beyond which it is worth a note
LEAST = 0.01  # of the longer timeline: what takes less is not worth one


def cost_sources(module: Module) -> str:
    """``device specs``, ``profile profile.json of 2026-03-01 12:30``; several where stages differ, or none."""
    return ", ".join(sorted({str(stage.attrs["costs"]) for stage in module.stages if "costs" in stage.attrs}))


def costs_note(sources: str) -> str:
    """Where costs come from, and what would give better ones."""
    remedy = "; run `arachnec profile`" if "device specs" in sources else ""
    return f"costs: {sources or 'not known'}{remedy}"


def differs(planned_ms: float, measured_ms: float) -> bool:
    """Whether what was measured is another time than planned by more than half of that."""
    return abs(measured_ms - planned_ms) > 0.5 * planned_ms


def run_note(planned_ms: float, measured_ms: float, sources: str) -> str:
    """``planned 1.944 s, measured 7.352 s; costs: device specs; run `arachnec profile```."""
    return f"planned {ms(planned_ms)}, measured {ms(measured_ms)}; {costs_note(sources)}"


def differences(module: Module, plan: Timeline, measured: Timeline) -> list[str]:
    """Sentences on what took more than twice as long as planned, or less than half: the step, and what stages did in
    it. Empty where all is within that."""
    found = []
    if (word := ratio_words(plan.end, measured.end)) is not None:
        found.append(f"{measured.title[:1].upper()}{measured.title[1:]}: {ms(measured.end)}, {word}.")
    expected, taken = stage_times(module, plan), stage_times(module, measured)
    for (stage, op), planned_ms in expected.items():
        measured_ms = taken.get((stage, op))
        small = max(planned_ms, measured_ms or 0.0) < LEAST * max(plan.end, measured.end)
        if measured_ms is None or small or (word := ratio_words(planned_ms, measured_ms)) is None:
            continue
        found.append(f"{op.capitalize()} of @{stage}: {ms(measured_ms)} in all, {word}.")
    if found:
        costs = costs_note(cost_sources(module))
        found.append(f"{costs[:1].upper()}{costs[1:]}.")
    return found


def memory_words(module: Module, measured: Timeline) -> list[str]:
    """What the ranks held at most, in a sentence; none where that was not measured."""
    if not measured.peak_gib:
        return []
    rank, peak = max(measured.peak_gib.items(), key=lambda pair: pair[1])
    process = " (of a CPU rank the whole process, its libraries among it)" if on_cpu(module) else ""
    return [f"Measured memory: at most {peak:.3g} GiB, on rank {rank}{process}."]


def on_cpu(module: Module) -> bool:
    """Whether its ranks are processes on CPUs, of which memory is measured as a whole."""
    return module.cluster is not None and module.cluster.attrs.get("device") == "cpu"


def ratio_words(planned_ms: float, measured_ms: float) -> str | None:
    """``3.8 times the planned 1.94 s``; None within a factor of two."""
    if planned_ms <= 0 or 1 / FACTOR <= measured_ms / planned_ms <= FACTOR:
        return None
    return f"{measured_ms / planned_ms:.2g} times the planned {ms(planned_ms)}"


def stage_times(module: Module, timeline: Timeline) -> Mapping[tuple[str, str], float]:
    """ms of each stage and operation, over its cascades. Of ranks that share one, the time of the rank that came last:
    the others waited for it."""
    stage_of = {cascade.name: cascade.stage for cascade in module.cascades}
    shortest: dict[tuple[str, str], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for interval in timeline.intervals:
        if interval.op in COMPUTE and interval.target in stage_of:
            shortest[interval.target, interval.op][interval.rank] += interval.end - interval.start
    total: dict[tuple[str, str], float] = defaultdict(float)
    for (target, op), by_rank in shortest.items():
        total[stage_of[target], op] += min(by_rank.values())
    return total
