"""What is known of a run: one event per step, and the report of them all."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from arachnec.analysis.uses import COMPUTE
from arachnec.ir.diagnostic import writing
from arachnec.ir.nodes import Instruction, Module, Program, quantity
from arachnec.launch.start_times import StartTimes
from arachnec.model_state.layer_summary import LayerSummary
from arachnec.runtime.step_progress import Interval
from arachnec.views.planned_and_measured import differs, run_note

if TYPE_CHECKING:
    from arachnec.runtime.device_runtime import DeviceRuntime

GIB = 2**30
NO_START = StartTimes()


class ClipNote(msgspec.Struct, frozen=True):
    """What happened to a clip on some ranks."""

    clip: str | int
    ranks: list[int]
    reason: str = ""


class StepReport(msgspec.Struct, frozen=True, tag_field="event", tag="step"):
    """One step, as rank 0 reports it. Times in ms; ``planned`` by the plan's own numbers, all others measured."""

    step: int
    iteration: int
    loss: float | None  # None where it is not finite
    gradient_norm: float | None
    step_ms: float
    planned_ms: float
    imbalance: float
    tokens_per_s: float
    exposed_planning_ms: float
    peak_memory_gib: float
    cascades: int
    peak_reserved_gib: float = 0.0  # by the device's allocator, in use or not; as the peak where nobody counts
    from_host: int = 0  # bytes of the model and of blocks' inputs that came from host memory, on all ranks together
    to_host: int = 0
    skipped: bool = False  # the gradient was not finite: no parameter changed
    not_finite: list[ClipNote] = []  # the clips whose loss was not finite
    lr: float = 0.0  # learning rate of the optimizer's first group
    set_aside: list[ClipNote] = []  # the clips that could not be used; the loss is the mean of the others
    validation_loss: float | None = None  # behind this step, where it was due


class Note(msgspec.Struct, frozen=True, tag_field="event", tag="note"):
    """Something to tell the person in front of the screen."""

    text: str


class Start(msgspec.Struct, frozen=True, tag_field="event", tag="start"):
    ranks: int
    device: str
    first_step: int
    steps: int
    costs: str = ""  # where planned times come from


Event = StepReport | Note | Start


class RunReport(msgspec.Struct, frozen=True):
    """``--report``: every step of a run, and the means over all steps but the first, which warms up."""

    ranks: int
    device: str
    steps: list[StepReport]
    mean_step_ms: float
    mean_planned_ms: float
    mean_imbalance: float
    mean_tokens_per_s: float
    exposed_planning_ms: float
    peak_memory_gib: float
    peak_reserved_gib: float
    attention: dict[str, str]  # the kernel family of each grid of the last step
    plans_reused: int = 0  # batches that ran the plan of an earlier one of the same shapes
    sparse_layers: list[LayerSummary] = []  # those that can attend to chosen keys, after the last step
    start: StartTimes = NO_START  # seconds of each part of rank 0's start
    costs: str = ""  # where planned times come from
    note: str = ""  # on them, where the mean step took another time than planned by more than half


class Measured(msgspec.Struct, frozen=True):
    """``measured.json``: when each instruction of the last step ran on each rank, ms from the step's start.

    ``iteration`` is the global batch of that step, ``peak_gib`` the most memory that each rank held in it.
    """

    step: int
    iteration: int
    intervals: list[Interval]
    peak_gib: list[float] = []


def run_report(
    ranks: int,
    device: str,
    steps: Sequence[StepReport],
    attention: Mapping[str, str],
    plans_reused: int = 0,
    sparse_layers: Sequence[LayerSummary] = (),
    start: StartTimes = NO_START,
    costs: str = "",
) -> RunReport:
    """Raises ValueError without steps."""
    warm = steps[1:] or steps
    planned, measured = _mean([s.planned_ms for s in warm]), _mean([s.step_ms for s in warm])
    return RunReport(
        ranks=ranks,
        device=device,
        steps=list(steps),
        mean_step_ms=measured,
        mean_planned_ms=planned,
        mean_imbalance=_mean([s.imbalance for s in warm]),
        mean_tokens_per_s=_mean([s.tokens_per_s for s in warm]),
        exposed_planning_ms=sum(s.exposed_planning_ms for s in steps),
        peak_memory_gib=max(s.peak_memory_gib for s in steps),
        peak_reserved_gib=max(s.peak_reserved_gib for s in steps),
        attention=dict(attention),
        plans_reused=plans_reused,
        sparse_layers=list(sparse_layers),
        start=start,
        costs=costs,
        note=run_note(planned, measured, costs) if differs(planned, measured) else "",
    )


def accumulated(step: int, reports: Sequence[StepReport], clips: int) -> StepReport:
    """An optimizer step over several batches, of so many ``clips``: losses are shares, times add up."""
    last = reports[-1]
    if len(reports) == 1:
        return msgspec.structs.replace(last, step=step)
    losses = [r.loss for r in reports if r.loss is not None]
    aside = [note for r in reports for note in r.set_aside]
    ms = sum(r.step_ms for r in reports)
    return msgspec.structs.replace(
        last,
        step=step,
        loss=sum(losses) * clips / max(1, clips - len(aside)) if len(losses) == len(reports) else None,
        step_ms=ms,
        planned_ms=sum(r.planned_ms for r in reports),
        imbalance=sum(r.imbalance * r.step_ms for r in reports) / ms,
        tokens_per_s=sum(r.tokens_per_s * r.step_ms for r in reports) / ms,
        exposed_planning_ms=sum(r.exposed_planning_ms for r in reports),
        peak_memory_gib=max(r.peak_memory_gib for r in reports),
        cascades=sum(r.cascades for r in reports),
        peak_reserved_gib=max(r.peak_reserved_gib for r in reports),
        from_host=sum(r.from_host for r in reports),
        to_host=sum(r.to_host for r in reports),
        not_finite=[note for r in reports for note in r.not_finite],
        set_aside=aside,
    )


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing(path):
        path.write_bytes(msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n")


@dataclass(frozen=True)
class PlannedTimes:
    """What a program states, in ms: when its last rank ``ends``, and what each rank computes, by rank."""

    ends: float
    busy: Mapping[int, float]

    @classmethod
    def of(cls, module: Module) -> PlannedTimes:
        """Looks at every instruction of every rank: once for a program, however many steps run it."""
        ends = max((_planned_end(program) for program in module.programs), default=0.0)
        busy = {
            p.rank: sum(_ms(step, "time") for step in p.instructions if step.op in COMPUTE) for p in module.programs
        }
        return cls(ends, busy)


def imbalance(busy: Sequence[float]) -> float:
    """Mean over ranks of (t_max - t_rank) / t_max, of the time each was computing."""
    longest = max(busy, default=0.0)
    return sum((longest - ms) / longest for ms in busy) / len(busy) if longest > 0 else 0.0


def busy_ms(intervals: Sequence[Interval]) -> float:
    return sum(i.end - i.start for i in intervals if i.op in COMPUTE)


def peak_memory_gib(runtime: DeviceRuntime) -> float:
    """Allocated on the device in this step where its allocator counts, else resident since the process began."""
    allocated = runtime.peak_memory()
    if allocated is not None:
        return allocated / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / GIB if sys.platform == "darwin" else peak * 1024 / GIB


def peaks_gib(runtime: DeviceRuntime) -> tuple[float, float]:
    """The peak of memory, and what the device's allocator held at most, in use or not; equal where nobody counts."""
    peak, reserved = peak_memory_gib(runtime), runtime.peak_reserved()
    return peak, peak if reserved is None else reserved / GIB


def _planned_end(program: Program) -> float:
    now = 0.0
    for step in program.instructions:
        now = max(now, _ms(step, "start")) + _ms(step, "time")
    return now


def _ms(step: Instruction, name: str) -> float:
    return quantity(step.attrs[name]) if name in step.attrs else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
