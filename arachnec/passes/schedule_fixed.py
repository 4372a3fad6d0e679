"""Schedules in which chains of jobs are dealt to fixed groups of neighbouring GPUs, as fixed layouts train."""

from __future__ import annotations

from arachnec.passes.schedule_problem import Problem, Schedule


def best_one_degree(problem: Problem) -> Schedule:
    """The shortest of the schedules that give every job one degree, over all degrees."""
    degrees = sorted({choice.degree for job in problem.jobs for choice in job.choices})
    tried = [deal(problem, at_least(problem, degree), in_turn=False) for degree in degrees]
    return min(tried, key=lambda schedule: schedule.makespan(problem))


def at_least(problem: Problem, degree: int) -> list[int]:
    """For every job its first choice of at least this degree, else its last."""
    return [
        next((k for k, choice in enumerate(job.choices) if choice.degree >= degree), len(job.choices) - 1)
        for job in problem.jobs
    ]


def deal(problem: Problem, picks: list[int], *, in_turn: bool) -> Schedule:
    """Chains of jobs dealt to runs of neighbouring GPUs, in turn or to those that are free first.

    A chain is a job that nothing waits for and all that it waits for; its jobs run one after another.
    """
    widths = [job.choices[pick].degree for job, pick in zip(problem.jobs, picks, strict=True)]
    sinks = [index for index in range(len(problem.jobs)) if not problem.after[index]]
    if not in_turn:
        sinks.sort(key=lambda j: (-widths[j], -problem.jobs[j].choices[picks[j]].ticks, j))
    free = [0] * problem.gpus
    starts = [-1] * len(problem.jobs)
    ends = [0] * len(problem.jobs)
    turn = 0
    for sink in sinks:
        chain = [j for j in chain_of(problem, sink) if starts[j] < 0]
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
    return Schedule(tuple(picks), tuple(starts))


def chain_of(problem: Problem, sink: int) -> list[int]:
    """A job and all that it waits for, in an order in which they can run."""
    found: list[int] = []
    for earlier in problem.jobs[sink].before:
        found += [j for j in chain_of(problem, earlier) if j not in found]
    return [*found, sink]
