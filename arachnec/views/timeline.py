"""When every instruction ran on every rank: planned, simulated or measured, all in one form."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from arachnec.analysis.memory import usages
from arachnec.analysis.uses import COMPUTE as COMPUTE
from arachnec.analysis.uses import READS_GRADIENTS, Values, gib, moved_by
from arachnec.ir.diagnostic import UserError, user_error, writing
from arachnec.ir.limits import LARGEST_DATA, LONGEST_MS, MOST_GIB, MOST_GPUS
from arachnec.ir.nodes import Instruction, Module, Program, quantity
from arachnec.simulation.events import Interval as Interval
from arachnec.simulation.events import Transfer as Transfer

AFTER = ("reduce", *READS_GRADIENTS)  # the cascades
DRAWN = (*COMPUTE, *AFTER)
SHORTEST_MS = 1e-9


def bad_measured_error(path: str, reason: str) -> UserError:
    return user_error(
        f"{path} is not a measured timeline: {reason}", help="`arachnec run` writes it; run again, or remove it"
    )


@dataclass(frozen=True)
class Timeline:
    """All intervals of one iteration under a title such as ``planned`` or ``measured``.

    ``everyone`` names ranks that belong to it even where they have nothing to do. ``peak_gib`` is the most memory that
    each rank held, where that was measured: of a GPU what was allocated, of a CPU rank its whole process.
    """

    title: str
    intervals: tuple[Interval, ...]
    transfers: tuple[Transfer, ...] = ()
    everyone: tuple[int, ...] = ()
    peak_gib: Mapping[int, float] = field(default_factory=dict)

    @cached_property
    def lanes(self) -> dict[int, tuple[Interval, ...]]:
        """The intervals of every rank, by start."""
        rows: dict[int, list[Interval]] = {rank: [] for rank in self.everyone}
        for interval in sorted(self.intervals, key=lambda i: (i.rank, i.start, i.end)):
            rows.setdefault(interval.rank, []).append(interval)
        return {rank: tuple(rows[rank]) for rank in sorted(rows)}

    @cached_property
    def end(self) -> float:
        return max((interval.end for interval in self.intervals), default=0.0)

    def busy_ms(self, rank: int) -> float:
        """ms in which the rank computed cascades."""
        return sum(i.end - i.start for i in self.lanes.get(rank, ()) if i.op in COMPUTE)


def scale_end(*ends: float) -> float:
    """Where an axis ends that shows all of these, in ms: after 1 where nothing lasts, or too short for a quotient."""
    longest = max(ends, default=0.0)
    return longest if longest > SHORTEST_MS else 1.0


def cascade_times(timeline: Timeline) -> dict[str, tuple[float, float, float]]:
    """For every cascade that ran: first start, last end, and the most ms that one of its ranks was in it."""
    starts: dict[str, float] = {}
    ends: dict[str, float] = {}
    inside: dict[tuple[str, int], float] = {}
    for i in timeline.intervals:
        if i.op in COMPUTE:
            starts[i.target] = min(starts.get(i.target, i.start), i.start)
            ends[i.target] = max(ends.get(i.target, i.end), i.end)
            inside[i.target, i.rank] = inside.get((i.target, i.rank), 0.0) + i.end - i.start
    longest: dict[str, float] = {}
    for (target, _), time in inside.items():
        longest[target] = max(longest.get(target, 0.0), time)
    return {target: (starts[target], ends[target], longest[target]) for target in starts}


def imbalance(busy: Iterable[float]) -> float:
    """Mean over ranks of (t_max - t_rank) / t_max."""
    times = list(busy)
    longest = max(times, default=0.0)
    return sum(longest - load for load in times) / longest / len(times) if longest > 0 else 0.0


def planned(module: Module) -> Timeline:
    """What a lowered module's own ``start`` and ``time`` say; what has no start follows the last end of its ranks."""
    ends = {program.rank: 0.0 for program in module.programs}
    intervals: list[Interval] = []
    for program in module.programs:
        for instruction in program.instructions:
            if instruction.op not in COMPUTE:
                continue
            start = _ms(instruction, "start", ends[program.rank])
            end = start + _ms(instruction, "time", 0.0)
            ends[program.rank] = max(ends[program.rank], end)
            intervals.append(Interval(program.rank, instruction.op, instruction.target, start, end))
    spans = _reduce_spans(module, ends)
    for program in module.programs:
        free = ends[program.rank]
        for instruction in program.instructions:
            if instruction.op == "reduce":
                start, end = spans[_reduce_key(instruction)]
                if end <= free and end > start:  # hidden behind what the rank does
                    continue
                start = max(free, start)
            elif instruction.op in READS_GRADIENTS:
                start, end = free, free + _ms(instruction, "time", 0.0)
            else:
                continue
            intervals.append(Interval(program.rank, instruction.op, instruction.target, start, end))
            free = max(free, end)
    return Timeline("planned", tuple(intervals), everyone=tuple(ends))


def _reduce_spans(module: Module, ends: dict[int, float]) -> dict[Hashable, tuple[float, float]]:
    """Start and end of every gradient all-reduce: once all its ranks have come to it and its group is free."""
    ready: dict[Hashable, float] = {}
    first: dict[Hashable, Instruction] = {}
    for program in module.programs:
        for instruction in program.instructions:
            if instruction.op == "reduce":
                key = _reduce_key(instruction)
                first.setdefault(key, instruction)
                ready[key] = max(ready.get(key, 0.0), ends[program.rank] - _ms(instruction, "early", 0.0))
    free: dict[tuple[int, ...], float] = {}
    spans: dict[Hashable, tuple[float, float]] = {}
    for key, instruction in first.items():
        start = max(ready[key], free.get(instruction.peers, 0.0))
        free[instruction.peers] = start + _ms(instruction, "time", 0.0)
        spans[key] = start, free[instruction.peers]
    return spans


def _reduce_key(instruction: Instruction) -> Hashable:
    return instruction.target, instruction.peers, moved_by(instruction)


def read_measured(path: Path) -> Timeline:
    """``measured.json`` as ``arachnec run`` writes it.

    ``{"step": 19, "iteration": 1, "peak_gib": [12.5, ...], "intervals": [{"rank": 0, "op": ..., ...}]}``, the iteration
    being the global batch, the peaks those of ranks from 0 on; the step is null where a program samples.

    Raises UserError where the file holds something else.
    """

    class Measured(msgspec.Struct, frozen=True):
        step: int | None
        intervals: tuple[Interval, ...]
        iteration: int = 0
        peak_gib: Annotated[tuple[Annotated[float, Meta(ge=0, le=MOST_GIB)], ...], Meta(max_length=MOST_GPUS)] = ()

    if path.stat().st_size > LARGEST_DATA:
        raise bad_measured_error(str(path), f"it is larger than {LARGEST_DATA >> 20} MiB")
    try:
        with writing(path):
            content = msgspec.json.decode(path.read_bytes(), type=Measured)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise bad_measured_error(str(path), str(error)) from error
    for number, interval in enumerate(content.intervals):
        if not 0 <= interval.rank < MOST_GPUS:
            raise bad_measured_error(str(path), f"interval {number} is of rank {interval.rank}")
        if not -LONGEST_MS <= interval.start <= interval.end <= LONGEST_MS:
            reason = f"interval {number} lasts from {interval.start:g} to {interval.end:g} ms"
            raise bad_measured_error(str(path), reason)
    of = f" of iteration {content.iteration}" if content.iteration else ""
    step = "" if content.step is None else f", step {content.step}{of}"
    return Timeline(f"measured{step}", content.intervals, peak_gib=dict(enumerate(content.peak_gib)))


def _ms(instruction: Instruction, name: str, default: float) -> float:
    value = instruction.attrs.get(name)
    return default if value is None else quantity(value)


Curve = tuple[tuple[float, float], ...]  # ms and GiB: what is held from then on


def memory_curves(module: Module, timeline: Timeline | None = None) -> dict[int, Curve]:
    """A step function for every rank of a lowered module, at the planned times unless others are given."""
    values = Values(module)
    lanes = (timeline or planned(module)).lanes
    return {program.rank: _curve(values, program, lanes) for program in module.programs}


def _curve(values: Values, program: Program, lanes: dict[int, tuple[Interval, ...]]) -> Curve:
    spans: dict[tuple[str, str], deque[tuple[float, float]]] = defaultdict(deque)
    for interval in lanes.get(program.rank, ()):
        spans[interval.op, interval.target].append((interval.start, interval.end))
    steps = list(usages(values, program))
    points: list[tuple[float, float]] = [(0.0, steps[0].total)]
    clock = 0.0
    for index, instruction in enumerate(program.instructions):
        usage = steps[index + 1]
        times = spans.get((instruction.op, instruction.target))
        if instruction.op not in DRAWN or not times:
            _add(points, clock, usage.total)
            continue
        start, end = times.popleft()
        _add(points, max(clock, start), usage.total)
        clock = max(clock, end)
        after = steps[index + 2] if index + 2 < len(steps) else None
        if after is not None:
            _add(points, clock, after.total - _gained(values, program.instructions[index + 1]) - after.workspace)
    return tuple(points)


def _gained(values: Values, instruction: Instruction) -> float:
    """GiB that an instruction adds to what is held beyond its end."""
    keeps = values.saves(instruction) or values.makes(instruction) is not None
    return gib(instruction, "memory") if keeps else 0.0


def _add(points: list[tuple[float, float]], time: float, size: float) -> None:
    """A step; of several at one time the most counts for that moment, and the last from then on."""
    if abs(points[-1][1] - size) > 1e-9:
        points.append((time, size))
