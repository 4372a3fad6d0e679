"""The scheduling problem that a costed module poses, stripped to numbers, and the way back to a module.

Jobs are moldable: each has choices of a degree and the ticks it then holds that many GPUs. GPUs are interchangeable
here (``place`` says which); the clock is in microseconds, times rounded up. Both make the problem exact for Z3.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from arachnec.ir.diagnostic import Diagnostic, UserError
from arachnec.ir.nodes import Cascade, Level, Module, Phase, Reduce, Step
from arachnec.ir.values import Attributes, Quantity
from arachnec.passes.cost import CostModel, times_of

TICKS = 1000  # per ms


@dataclass(frozen=True)
class FitsNoDegree(Diagnostic):
    title: ClassVar[str] = (
        "{what} fits no degree: it needs {needed:.1f} GiB per GPU at degree {degree}, there are {room:.1f}"
    )
    label: ClassVar[str] = "too large for this cluster"
    help: ClassVar[str] = "{remedy}"
    what: str
    needed: float
    degree: int
    room: float
    remedy: str


@dataclass(frozen=True)
class StateTooLarge(Diagnostic):
    title: ClassVar[str] = (
        "parameters and optimizer state take {state:.1f} of the device's {memory:.1f} GiB on every rank"
    )
    help: ClassVar[str] = "use devices with more memory, train fewer parameters, or a narrower dtype"
    state: float
    memory: float


@dataclass(frozen=True)
class NoDegree(Diagnostic):
    title: ClassVar[str] = "{what} has no legal degree on {world} GPUs"
    label: ClassVar[str] = "legal are {legal}"
    help: ClassVar[str] = "use a cluster of at least {least} GPUs, or measure it at a smaller degree"
    what: str
    world: int
    legal: str
    least: int


@dataclass(frozen=True)
class Choice:
    """One way to run a job: on ``degree`` GPUs for ``ticks``."""

    degree: int
    ticks: int
    recompute: bool = False

    @property
    def area(self) -> int:
        return self.degree * self.ticks


@dataclass(frozen=True)
class Job:
    """``choices`` ascend in degree and strictly descend in ticks; ``before`` are the jobs it waits for."""

    choices: tuple[Choice, ...]
    before: tuple[int, ...] = ()


@dataclass(frozen=True)
class Problem:
    """Jobs in an order in which every job stands after those it waits for."""

    jobs: tuple[Job, ...]
    gpus: int

    @cached_property
    def after(self) -> tuple[tuple[int, ...], ...]:
        waiting: list[list[int]] = [[] for _ in self.jobs]
        for index, job in enumerate(self.jobs):
            for earlier in job.before:
                waiting[earlier].append(index)
        return tuple(tuple(row) for row in waiting)

    @cached_property
    def heads(self) -> tuple[int, ...]:
        """Ticks before which each job cannot start: its longest chain of predecessors, each at its fastest."""
        heads: list[int] = []
        for job in self.jobs:
            heads.append(max((heads[j] + self.jobs[j].choices[-1].ticks for j in job.before), default=0))
        return tuple(heads)

    @cached_property
    def tails(self) -> tuple[int, ...]:
        """Ticks that must follow each job's end: its longest chain of successors, each at its fastest."""
        tails = [0] * len(self.jobs)
        for index in reversed(range(len(self.jobs))):
            for later in self.after[index]:
                tails[index] = max(tails[index], tails[later] + self.jobs[later].choices[-1].ticks)
        return tuple(tails)


@dataclass(frozen=True)
class Schedule:
    """For every job the index of its choice and its start in ticks."""

    picks: tuple[int, ...]
    starts: tuple[int, ...]

    def makespan(self, problem: Problem) -> int:
        ends = (
            start + job.choices[pick].ticks
            for job, pick, start in zip(problem.jobs, self.picks, self.starts, strict=True)
        )
        return max(ends, default=0)


def violations(problem: Problem, schedule: Schedule) -> list[str]:
    """Every way in which a schedule breaks its problem; empty when it is valid."""
    found: list[str] = []
    events: list[tuple[int, int]] = []
    ends: list[int] = []
    for index, (job, pick, start) in enumerate(zip(problem.jobs, schedule.picks, schedule.starts, strict=True)):
        choice = job.choices[pick]
        ends.append(start + choice.ticks)
        events += [(start, choice.degree), (ends[-1], -choice.degree)]
        if start < 0:
            found.append(f"job {index} starts at {start}")
        found += [f"job {index} starts before job {j} ends" for j in job.before if schedule.starts[index] < ends[j]]
    held = 0
    for tick, change in sorted(events):
        held += change
        if held > problem.gpus:
            found.append(f"{held} of {problem.gpus} GPUs are held at tick {tick}")
            break
    return found


def problem_of(module: Module, cost: CostModel) -> Problem:
    """The problem of a costed module.

    Raises UserError naming the clip where a cascade fits the memory at no degree.
    """
    if cost.room <= 0:
        raise UserError(StateTooLarge(None, cost.state, cost.cluster.memory))
    index = {cascade.name: position for position, cascade in enumerate(module.cascades)}
    memo: dict[tuple[object, ...], tuple[Choice, ...]] = {}
    jobs = []
    for cascade in module.cascades:
        key = (
            cascade.stage,
            cascade.phase,
            cascade.batch,
            cascade.tokens,
            cascade.text,
            cascade.attrs.get("times"),
            bool(cascade.inputs),
        )
        if key not in memo:
            memo[key] = choices_of(cascade, cost)
        jobs.append(Job(memo[key], tuple(index[name] for name in cascade.inputs if name in index)))
    return Problem(tuple(jobs), cost.cluster.world)


def choices_of(cascade: Cascade, cost: CostModel) -> tuple[Choice, ...]:
    """The degrees worth considering: they fit the memory, and each is faster than every smaller one.

    Where it fits only with recomputation it recomputes. Raises UserError where there is no degree at all.
    """
    legal = cost.legal_degrees(cascade)
    if not legal:
        degrees = sorted(times_of(cascade)) or [0]
        listed = ", ".join(str(degree) for degree in degrees)
        raise UserError(NoDegree(cascade.span, describe(cascade), cost.cluster.world, listed, degrees[0]))
    choices: list[Choice] = []
    for degree in legal:
        for recompute in (False, True) if cost.can_recompute(cascade) else (False,):
            if cost.memory(cascade, degree, recompute) > cost.room:
                continue
            ticks = max(1, math.ceil(cost.time(cascade, degree, recompute=recompute) * TICKS - 1e-6))
            if not choices or ticks < choices[-1].ticks:
                choices.append(Choice(degree, ticks, recompute))
            break
    if not choices:
        raise UserError(_fits_no_degree(cascade, cost, legal))
    return tuple(choices)


def _fits_no_degree(cascade: Cascade, cost: CostModel, legal: Sequence[int]) -> FitsNoDegree:
    recompute = cost.can_recompute(cascade)
    degree = min(legal, key=lambda d: cost.memory(cascade, d, recompute))
    needed = cost.memory(cascade, degree, recompute) + cost.state
    remedy = "train it at fewer frames or a lower resolution, or use more GPUs or devices with more memory"
    if cascade.batch > 1:
        remedy = "lower `tokens` of `partition` so that fewer clips share a micro-batch"
    return FitsNoDegree(cascade.span, describe(cascade), needed, degree, cost.cluster.memory, remedy)


def describe(cascade: Cascade) -> str:
    """A cascade in words: its clips, its size and its stage."""
    if not cascade.clips:
        return f"cascade `%{cascade.name}` of stage `@{cascade.stage}`"
    clips = ", ".join(str(clip) for clip in cascade.clips[:4]) + (", ..." if len(cascade.clips) > 4 else "")
    noun = "clip" if len(cascade.clips) == 1 else "the micro-batch of clips"
    return f"{noun} {clips} ({cascade.tokens} tokens, stage `@{cascade.stage}`)"


@dataclass(frozen=True)
class Solution:
    """A schedule with what is known of how good it is; bounds in ticks.

    ``area_bound`` is the bound that needs no search, ``bound`` the best one proved; ``proved`` where that is met.
    """

    schedule: Schedule
    area_bound: int
    bound: int
    proved: bool


def scheduled(module: Module, cost: CostModel, problem: Problem, solution: Solution) -> Module:
    """The module at level scheduled.

    Raises AssertionError where the schedule is not valid: a heuristic may be wrong, but never unnoticed.
    """
    schedule = solution.schedule
    problems = violations(problem, schedule)
    assert not problems, problems
    cascades = []
    for cascade, job, pick, start in zip(module.cascades, problem.jobs, schedule.picks, schedule.starts, strict=True):
        choice = job.choices[pick]
        cascades.append(
            cascade.with_attrs(
                degree=choice.degree,
                start=ms(start),
                end=ms(start + choice.ticks),
                recompute=True if choice.recompute else None,
                memory=Quantity(round(cost.memory(cascade, choice.degree, choice.recompute), 6), "GiB"),
            )
        )
    trained = [stage.name for stage in module.stages if stage.trained]
    return replace(
        module,
        level=Level.SCHEDULED,
        cascades=tuple(cascades),
        reductions=tuple(
            Reduce(name, tuple(c.name for c in cascades if c.stage == name and has_gradient(c)), Attributes())
            for name in trained
        ),
        steps=tuple(Step(name) for name in trained),
        attrs=module.attrs.updated(
            makespan=ms(schedule.makespan(problem)),
            bound=ms(solution.bound),
            area_bound=ms(solution.area_bound),
            proved=solution.proved,
        ),
    )


def has_gradient(cascade: Cascade) -> bool:
    return cascade.phase in (Phase.TRAIN, Phase.BACKWARD, Phase.WEIGHT)


def ms(ticks: int) -> Quantity:
    return Quantity(ticks / TICKS, "ms")
