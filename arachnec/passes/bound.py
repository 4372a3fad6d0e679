"""A lower bound on the makespan that holds for every schedule, whatever the degrees.

The bound is the least T for which all of this can be true (and each must be, in a schedule that ends by T):

* every job has a choice that fits between its chain of predecessors and its chain of successors, each at its fastest;
* the areas (degree x ticks), each job at the smallest of those choices, sum to at most GPUs x T;
* jobs that hold more than half of the GPUs under each of those choices fit one after another.

All three only get easier as T grows, so bisection finds it.
"""

from __future__ import annotations

from arachnec.passes.schedule_problem import Problem


def lower_bound(problem: Problem) -> int:
    """Ticks below which no schedule ends; 0 without jobs."""
    low = longest_chain(problem)
    high = max(low, sum(min(choice.ticks for choice in job.choices) for job in problem.jobs))
    if high < 1:
        return 0
    while not _possible(problem, high):
        high *= 2
    while low < high:
        middle = (low + high) // 2
        if _possible(problem, middle):
            high = middle
        else:
            low = middle + 1
    return low


def longest_chain(problem: Problem) -> int:
    """Ticks of the longest chain, every job at its fastest."""
    return max((head + job.choices[-1].ticks for head, job in zip(problem.heads, problem.jobs, strict=True)), default=0)


def _possible(problem: Problem, horizon: int) -> bool:
    area = 0
    wide = 0
    for job, head, tail in zip(problem.jobs, problem.heads, problem.tails, strict=True):
        allowed = [choice for choice in job.choices if head + choice.ticks + tail <= horizon]
        if not allowed:
            return False
        area += min(choice.area for choice in allowed)
        if 2 * allowed[0].degree > problem.gpus:
            wide += allowed[-1].ticks
    return area <= problem.gpus * horizon and wide <= horizon
