"""What an iteration would take, without running it, from the events over its program (``arachnec.simulation``)."""

from __future__ import annotations

from dataclasses import dataclass

from arachnec.analysis.memory import high_water
from arachnec.analysis.uses import Values, split_backwards
from arachnec.cluster.device_specs import find_device_specs
from arachnec.cluster.topology import machines
from arachnec.ir.nodes import Cascade, Module, Phase, Stage
from arachnec.ir.sampling import CODING, as_forward, planned_steps
from arachnec.ir.stage_sizes import formula_in
from arachnec.simulation.events import Engine
from arachnec.views.timeline import COMPUTE, Timeline, imbalance

FORWARDS = {Phase.TRAIN: 3.0, Phase.BACKWARD: 2.0, Phase.WEIGHT: 1.0}  # work of a phase in forwards; others: one a step


@dataclass(frozen=True)
class Simulation:
    """What one iteration came to."""

    timeline: Timeline
    iteration_ms: float  # until the last rank has stepped
    makespan_ms: float  # until the last cascade has ended
    busy_ms: tuple[float, ...]  # per rank, in cascades
    idle_ms: tuple[float, ...]  # per rank, neither in cascades nor in reduce and step
    imbalance: float  # mean over ranks of (t_max - t_rank) / t_max, of busy_ms
    peak_memory_gib: tuple[float, ...]  # per rank
    mfu: float | None  # model FLOPs over the devices' peak; None where either is not known


def simulate(module: Module) -> Simulation:
    """Run a lowered module that ``check`` has passed.

    Raises RuntimeError where ranks wait for each other, which ``check`` would have refused.
    """
    assert module.cluster is not None, "a lowered module has a cluster"
    values = Values(module)
    engine = Engine(values, module.cluster)
    engine.run()
    ranks = tuple(program.rank for program in module.programs)
    timeline = Timeline("simulated", tuple(engine.intervals), tuple(engine.transfers), ranks)
    busy = tuple(timeline.busy_ms(rank) for rank in ranks)
    worked = (sum(i.end - i.start for i in timeline.lanes.get(rank, ())) for rank in ranks)
    iteration = timeline.end
    return Simulation(
        timeline=timeline,
        iteration_ms=iteration,
        makespan_ms=max((i.end for i in engine.intervals if i.op in COMPUTE), default=0.0),
        busy_ms=busy,
        idle_ms=tuple(iteration - ms for ms in worked),
        imbalance=imbalance(busy),
        peak_memory_gib=tuple(high_water(values, program).total for program in module.programs),
        mfu=model_flops_utilization(module, iteration),
    )


def model_flops_utilization(module: Module, iteration_ms: float) -> float | None:
    """TFLOP that the model needs, without recomputation, over what the cluster's devices could do at their peak."""
    assert module.cluster is not None
    specs = [find_device_specs(machine.device) for machine in machines(module.cluster)]
    peaks = [device.peak for device in specs if device is not None and device.name != "cpu"]
    if len(peaks) < len(specs) or iteration_ms <= 0:
        return None
    stages = {stage.name: stage for stage in module.stages}
    split = split_backwards(module)
    needed = [
        _tflop(cascade, stages[cascade.stage], cascade.name in split)
        for cascade in module.cascades
        if cascade.phase not in CODING
    ]
    if not needed or None in needed:
        return None
    total = sum(tflop for tflop in needed if tflop is not None)
    return total / (iteration_ms / 1e3 * module.cluster.gpus * sum(peaks))


def _tflop(cascade: Cascade, stage: Stage, split: bool) -> float | None:
    """``split``: a backward that leaves its weight gradients to another cascade."""
    flops = formula_in(stage, "flops")
    if flops is None:
        return None
    forwards = 1.0 if split else FORWARDS.get(cascade.phase, float(planned_steps(cascade)))
    cascade = as_forward(cascade)
    return forwards * flops(B=cascade.batch, S=cascade.tokens, T=cascade.text)
