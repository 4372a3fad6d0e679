"""Degrees whose aligned blocks nest, chosen so that they waste least.

Blocks nest wherever each width divides the next (``solver.block_packing``): powers of 2, or 1, 2, 4, 8, 24, 48 as well.
Where a cascade's least work is at 24 ranks, because its 24 heads divide or because it need not recompute there, 16 and
32 cost it a tenth. So of all chains of widths that keep nodes whole the one is taken under which all jobs need least
area, and a problem with those degrees alone is solved in its place: its schedules can be placed as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from arachnec.solver.problem import Job, Problem, Schedule

# By which a width may be the next one's part: what numbers of heads and of GPUs are made of.
FACTORS = (2, 3, 5, 7)


@dataclass(frozen=True)
class Nested:
    """A problem with fewer choices; ``kept`` are their indices in the whole one's."""

    problem: Problem
    kept: tuple[tuple[int, ...], ...]

    @staticmethod
    def all_of(problem: Problem) -> Nested:
        """All choices."""
        return Nested(problem, tuple(tuple(range(len(job.choices))) for job in problem.jobs))

    def whole(self, schedule: Schedule) -> Schedule:
        """A schedule of the whole problem."""
        picks = tuple(kept[pick] for kept, pick in zip(self.kept, schedule.picks, strict=True))
        return Schedule(picks, schedule.starts)


def nested(problem: Problem, node: int, bound: int) -> list[Nested]:
    """The problem with degrees of nesting blocks alone, on nodes of so many GPUs, in one or two ways.

    First comes the one in which jobs need least area, then, where that is another, the one whose widths double: finer
    ones are easier to pack. A way in which a job has no degree is left out.
    """
    area = _areas(problem, bound)
    doubling, *others = chains(node, problem.gpus)
    best = min([doubling, *others], key=area)
    ways = [_with_widths(problem, widths) for widths in dict.fromkeys((best, doubling))]
    return [way for way in ways if way is not None]


def _with_widths(problem: Problem, widths: tuple[int, ...]) -> Nested | None:
    kept: dict[int, tuple[int, ...]] = {}
    for job in problem.jobs:
        if id(job.choices) not in kept:
            kept[id(job.choices)] = tuple(k for k, choice in enumerate(job.choices) if choice.degree in widths)
    if not all(kept.values()):
        return None
    choices = {id(job.choices): tuple(job.choices[k] for k in kept[id(job.choices)]) for job in problem.jobs}
    jobs = tuple(Job(choices[id(job.choices)], job.before) for job in problem.jobs)
    return Nested(Problem(jobs, problem.gpus, widths), tuple(kept[id(job.choices)] for job in problem.jobs))


def _areas(problem: Problem, bound: int) -> Callable[[Sequence[int]], float]:
    """The least area of all jobs at degrees of these widths, where each takes the bound at most."""
    import numpy as np

    kinds: dict[int, list[int]] = {}
    for index, job in enumerate(problem.jobs):
        kinds.setdefault(id(job.choices), []).append(index)
    degrees = sorted({choice.degree for jobs in kinds.values() for choice in problem.jobs[jobs[0]].choices})
    column = {degree: index for index, degree in enumerate(degrees)}
    never = float(sum(job.choices[-1].area for job in problem.jobs)) * len(problem.jobs) + 1.0
    areas = np.full((len(kinds), len(degrees)), never)
    for row, jobs in enumerate(kinds.values()):
        for choice in problem.jobs[jobs[0]].choices:
            if choice.ticks <= bound:
                areas[row, column[choice.degree]] = float(choice.area) * len(jobs)

    def area(widths: Sequence[int]) -> float:
        inside = [column[width] for width in widths if width in column]
        return float(areas[:, inside].min(axis=1).sum()) if inside else float("inf")

    return area


def chains(node: int, gpus: int) -> Iterator[tuple[int, ...]]:
    """Widths from 1 to at most ``gpus``, each a divisor of the next, that divide a node or are whole nodes.

    A chain that only doubles comes first, where nodes allow one.
    """

    def longer(widths: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        last = widths[-1]
        following = [last * factor for factor in FACTORS if last < node or last * factor <= gpus]
        if last < node:
            following = [width for width in following if node % width == 0] or [node]
        following = [width for width in following if width <= gpus]
        if not following:
            yield widths
        for width in following:
            yield from longer((*widths, width))

    yield from longer((1,))
