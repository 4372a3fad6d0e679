"""The tail of a schedule as a problem of its own: the jobs that start last, behind those still running then.

What starts before the tail stays where it is. Jobs that run into the tail hold their GPUs from its beginning for what
is left of them. A shorter tail is a shorter schedule.
"""

from __future__ import annotations

from dataclasses import dataclass

from arachnec.solver.budget import Clock
from arachnec.solver.gap_search import bisect
from arachnec.solver.problem import Choice, Job, Problem, Schedule, violations
from arachnec.solver.z3_question import Answer, Question
from arachnec.solver.z3_schedule import find_schedule


@dataclass(frozen=True)
class Tail:
    """``problem`` has the running jobs first, each with one choice; they start at 0. ``jobs`` names the others."""

    problem: Problem
    running: int
    jobs: tuple[int, ...]
    begin: int  # ticks


def tail_of(problem: Problem, schedule: Schedule, size: int) -> Tail:
    """The tail of the ``size`` jobs that start last."""
    order = sorted(range(len(problem.jobs)), key=lambda j: (schedule.starts[j], j))
    free = sorted(order[-size:])
    begin = min(schedule.starts[j] for j in free)
    ends = [
        start + job.choices[pick].ticks
        for job, pick, start in zip(problem.jobs, schedule.picks, schedule.starts, strict=True)
    ]
    running = [j for j in order[:-size] if ends[j] > begin]
    position = {j: index for index, j in enumerate([*running, *free])}
    jobs = [Job((Choice(problem.jobs[j].choices[schedule.picks[j]].degree, ends[j] - begin),)) for j in running] + [
        Job(problem.jobs[j].choices, tuple(position[i] for i in problem.jobs[j].before if i in position)) for j in free
    ]
    return Tail(Problem(tuple(jobs), problem.gpus), len(running), tuple(free), begin)


def with_tail(schedule: Schedule, tail: Tail, shorter: Schedule) -> Schedule:
    """The schedule with its tail replaced by a schedule of the tail's problem."""
    picks, starts = list(schedule.picks), list(schedule.starts)
    for j, pick, start in zip(tail.jobs, shorter.picks[tail.running :], shorter.starts[tail.running :], strict=True):
        picks[j], starts[j] = pick, tail.begin + start
    return Schedule(tuple(picks), tuple(starts))


def shorter_tail(
    problem: Problem, schedule: Schedule, bound: int, size: int, clock: Clock, seed: int
) -> tuple[Schedule, bool]:
    """The schedule with the best tail of ``size`` jobs that Z3 comes to, itself where there is no better.

    And whether Z3 had an answer.
    """
    tail = tail_of(problem, schedule, size)
    best, answered = schedule, True

    def ask(horizon: int) -> tuple[Answer, int]:
        nonlocal best, answered
        question = Question()
        answer, shorter = find_schedule(
            tail.problem, horizon, seed=seed, effort=clock.effort(), running=tail.running, question=question
        )
        clock.count_z3(question.steps)
        answered = answer is not Answer.UNKNOWN
        if shorter is None:
            return answer, 0
        joined = with_tail(best, tail, shorter)
        if violations(problem, joined):
            return Answer.UNKNOWN, 0
        best = joined
        return answer, shorter.makespan(tail.problem)

    bisect(max(bound - tail.begin, 0), schedule.makespan(problem) - tail.begin, ask)
    return best, answered
