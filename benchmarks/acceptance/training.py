"""Steps of Wan2.1-1.3B at three lengths on one device: model FLOPs utilisation, and time and memory as planned.

A global batch is one clip. Memory is the most of a length's steps: in the first there are no moments yet.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator

import gradient_parity as parity
from acceptance.machine import Machine, Row, verdict
from acceptance.runs import ran

from arachnec.backends.simulator import simulate
from arachnec.cluster.device_specs import find_device_specs
from arachnec.driver import compile, plan_iteration
from arachnec.ir.nodes import Module, Phase
from arachnec.ir.stage_sizes import evaluated

ROUNDS = 3  # over the lengths, the first to warm up
WAN = parity.ROOT / "examples" / "wan2_1_1_3b.py"
FRAMES = (17, 49, 81)  # of 480x832: 7,800, 20,280 and 32,760 tokens
SMALL = {"height": 64, "width": 64, "text_tokens": 8}
LARGE = {"height": 480, "width": 832, "text_tokens": 512}
TO_PLAN = 1.05  # of what was planned, that memory may take


def rows(machine: Machine) -> Iterator[Row]:
    model, size, frames = (parity.MODELS / "wan.py", SMALL, (1, 5, 9)) if machine.dry else (WAN, LARGE, FRAMES)
    clips = [{"id": f"{n}", "iteration": i, "frames": n, **size} for i, n in enumerate(frames)]
    data = machine.scratch / "clips.jsonl"
    data.write_text("".join(json.dumps(clip) + "\n" for clip in clips))
    compiled = compile(model, data, machine.cluster(1))
    folder = compiled.write(machine.scratch / "training")
    plans = [plan_iteration(compiled.model, compiled.pipeline, number)[0] for number in range(len(frames))]
    dtype = "fp32" if machine.dry else "bf16"
    report = ran(machine, folder, ROUNDS * len(frames), dtype=dtype)
    for number, plan in enumerate(plans):
        yield row_of(plan, report["device"], [step for step in report["steps"] if step["iteration"] == number])


def row_of(plan: Module, device: str, steps: list[Row]) -> Row:
    assert plan.cluster is not None
    simulation = simulate(plan)
    specs = find_device_specs(str(plan.cluster.attrs["device"]))
    measured = statistics.median(step["step_ms"] for step in steps[1:])
    work = model_tflop(plan)
    row = {
        "tokens": plan.clips[0].tokens,
        "device": device,
        "step_ms": measured,
        "planned_step_ms": simulation.iteration_ms,
        "model_tflop": work,
        "recomputed": any(step.attrs.get("recompute") is True for p in plan.programs for step in p.instructions),
        "mfu": None if specs is None else work / (measured * 1e-3) / specs.peak,
        "peak_tflops": None if specs is None else specs.peak,
        "memory_gib": max(step["peak_memory_gib"] for step in steps),
        "planned_memory_gib": max(simulation.peak_memory_gib),
        "exposed_planning_ms": max(step["exposed_planning_ms"] for step in steps[1:]),
    }
    row["memory_of_plan"] = row["memory_gib"] / row["planned_memory_gib"]
    return verdict(row, "memory_of_plan", TO_PLAN) if device != "cpu" else row


def model_tflop(plan: Module) -> float:
    """A forward and a backward, which is two of it; what is recomputed is not counted."""
    stages = {stage.name: stage for stage in plan.stages}
    total = 0.0
    for cascade in plan.cascades:
        if cascade.phase is Phase.TRAIN:
            total += 3 * evaluated(stages[cascade.stage], "flops", cascade)
    return total
