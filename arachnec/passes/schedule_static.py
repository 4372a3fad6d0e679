"""The fixed layouts that others train with, as schedules over the same cascades and costs.

* ``data-parallel``: every micro-batch on as few GPUs as hold it, dealt out in turn as they arrive (Open-Sora).
* ``one-degree``: the same degree for every train cascade (DeepSpeed-Ulysses with a fixed group), the GPUs cut into
  groups of that size, and the longest micro-batch first onto the group that is free first.

An encoder runs where its train cascade will, right before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from arachnec.ir.diagnostic import Diagnostic, UserError
from arachnec.ir.nodes import Level, Module
from arachnec.passes.base import Pass
from arachnec.passes.bound import lower_bound
from arachnec.passes.cost import CostModel
from arachnec.passes.schedule_module import problem_of, scheduled
from arachnec.passes.schedule_problem import Problem, Schedule, Solution


@dataclass(frozen=True)
class BadDegree(Diagnostic):
    title: ClassVar[str] = "`schedule-static{{degree={degree}}}` on a cluster of {world} GPUs"
    help: ClassVar[str] = "give a degree from 1 to {world}"
    degree: int
    world: int


@dataclass(frozen=True)
class ScheduleStatic(Pass):
    """A fixed layout.

    ``degree`` is the one degree; by default the smallest that holds the longest clip. A cascade that this degree does
    not hold or that does not allow it takes the next larger that does, else the largest it has.
    """

    needs: ClassVar[Level] = Level.COSTED
    gives: ClassVar[Level] = Level.SCHEDULED

    policy: Literal["one-degree", "data-parallel"] = "one-degree"
    degree: int | None = None

    def run(self, module: Module) -> Module:
        cost = CostModel(module)
        if self.degree is not None and self.degree < 1:
            raise UserError(BadDegree(None, self.degree, cost.cluster.world))
        problem = problem_of(module, cost)
        picks = self._picks(problem)
        widths = [job.choices[pick].degree for job, pick in zip(problem.jobs, picks, strict=True)]
        groups = deal(problem, picks, widths, in_turn=self.policy == "data-parallel")
        bound = lower_bound(problem)
        schedule = Schedule(tuple(picks), groups)
        return scheduled(module, cost, problem, Solution(schedule, bound, bound, schedule.makespan(problem) <= bound))

    def _picks(self, problem: Problem) -> list[int]:
        if self.policy == "data-parallel" and self.degree is None:
            return [0] * len(problem.jobs)
        last = [job for index, job in enumerate(problem.jobs) if not problem.after[index]]
        degree = self.degree or max(job.choices[0].degree for job in last)
        return [
            next((k for k, choice in enumerate(job.choices) if choice.degree >= degree), len(job.choices) - 1)
            if not problem.after[index]
            else 0
            for index, job in enumerate(problem.jobs)
        ]


def deal(problem: Problem, picks: list[int], widths: list[int], *, in_turn: bool) -> tuple[int, ...]:
    """Starts in ticks of chains dealt to runs of neighbouring GPUs, in turn or to those that are free first.

    A chain is a job that nothing waits for and all that it waits for; its jobs run one after another.
    """
    sinks = [index for index in range(len(problem.jobs)) if not problem.after[index]]
    if not in_turn:
        sinks.sort(key=lambda j: (-widths[j], -problem.jobs[j].choices[picks[j]].ticks, j))
    free = [0] * problem.gpus
    starts = [-1] * len(problem.jobs)
    ends = [0] * len(problem.jobs)
    turn = 0
    for sink in sinks:
        chain = [j for j in _chain(problem, sink) if starts[j] < 0]
        width = max(widths[j] for j in chain)
        if in_turn:
            turn = turn if turn + width <= problem.gpus else 0
            first = turn
            turn = (turn + width) % problem.gpus
        else:
            slots = range(0, problem.gpus - width + 1, width)
            first = min(slots, key=lambda slot: (max(free[slot : slot + width]), slot))
        for j in chain:
            ranks = range(first, first + widths[j])
            ready = max((ends[i] for i in problem.jobs[j].before), default=0)
            starts[j] = max(ready, max(free[rank] for rank in ranks))
            ends[j] = starts[j] + problem.jobs[j].choices[picks[j]].ticks
            for rank in ranks:
                free[rank] = ends[j]
    return tuple(starts)


def _chain(problem: Problem, sink: int) -> list[int]:
    found: list[int] = []
    for earlier in problem.jobs[sink].before:
        found += [j for j in _chain(problem, earlier) if j not in found]
    return [*found, sink]
