"""What every rank holds at every moment of the plan, by the same count that ``check`` proves."""

from __future__ import annotations

from collections import defaultdict, deque

from arachnec.analysis.memory import usages
from arachnec.analysis.uses import Values, gib
from arachnec.ir.nodes import Instruction, Module, Program
from arachnec.views.timeline import DRAWN, Interval, Timeline, planned

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
