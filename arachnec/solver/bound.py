"""A lower bound on the makespan that holds for every schedule, whatever the degrees.

The bound is the least T for which all of this can be true (and each must be, in a schedule that ends by T):

* every job has a choice that fits between its chain of predecessors and its chain of successors, each at its fastest;
* the areas (degree x ticks), each job at the smallest of those choices, sum to at most GPUs x T;
* jobs that hold more than half of the GPUs under each of those choices fit one after another.

All three only get easier as T grows, so bisection finds it. ``arachnec.solver.chain_bound`` adds what jobs that wait
for each other cannot do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from arachnec.solver.chain_bound import chain_bound
from arachnec.solver.problem import Problem, least_possible

# Of a time, by which it may be longer as if it were not: horizons begin there, a placement is as long as scheduled, a
# cascade as early on other ranks, a grid of the family of process groups as fast as any.
NEGLIGIBLE = 1e-3


def lower_bound(problem: Problem) -> int:
    """Ticks below which no schedule ends; 0 without jobs."""
    low = longest_chain(problem)
    return chain_bound(problem, least_possible(_Possible(problem), low)) if low else 0


def longest_chain(problem: Problem) -> int:
    """Ticks of the longest chain, every job at its fastest."""
    return max((head + job.choices[-1].ticks for head, job in zip(problem.heads, problem.jobs, strict=True)), default=0)


def horizons(bound: int) -> Iterator[float]:
    """Ticks from the bound up to twice as many, each twice as far above it as the one before."""
    yield bound
    for halvings in reversed(range(1 + round(-math.log2(NEGLIGIBLE)))):
        yield bound * (1 + 0.5**halvings)


class _Possible:
    """The three conditions as arrays with a row for each different kind of job."""

    def __init__(self, problem: Problem) -> None:
        import numpy as np

        self.gpus = problem.gpus
        kinds: dict[tuple[int, int], list[int]] = {}
        for index, (job, head, tail) in enumerate(zip(problem.jobs, problem.heads, problem.tails, strict=True)):
            kinds.setdefault((id(job.choices), head + tail), []).append(index)
        rows = [problem.jobs[jobs[0]].choices for jobs in kinds.values()]
        most = max(map(len, rows))
        largest = sum(len(jobs) * row[0].ticks * row[-1].degree for row, jobs in zip(rows, kinds.values(), strict=True))
        # numbers of any size where 64 bits are too few
        number = np.int64 if max(largest, problem.gpus) < 1 << 61 else object
        # a kind with fewer choices repeats its last
        padded = [(*row, *(row[-1:] * (most - len(row)))) for row in rows]
        self.degree = np.array([[choice.degree for choice in row] for row in padded], dtype=number)
        self.ticks = np.array([[choice.ticks for choice in row] for row in padded], dtype=number)
        self.area = self.degree * self.ticks
        self.many = np.array([len(jobs) for jobs in kinds.values()], dtype=number)
        self.needed = self.ticks + np.array([[around] for _, around in kinds], dtype=number)

    def __call__(self, horizon: int) -> bool:
        import numpy as np

        allowed = (self.needed <= horizon).astype(bool)
        if not allowed[:, -1].all():
            return False
        unlimited = self.area.max()
        area = int((np.where(allowed, self.area, unlimited).min(axis=1) * self.many).sum())
        narrowest = np.take_along_axis(self.degree, allowed.argmax(axis=1)[:, None], axis=1)[:, 0]
        wide = int((self.ticks[:, -1] * self.many)[(2 * narrowest > self.gpus).astype(bool)].sum())
        return area <= self.gpus * horizon and wide <= horizon
