"""Simulated annealing over degrees and order, decoded by list scheduling (``solver.decoder``).

A try changes degrees or moves a job in the order. What is minimised is the GPU time above a horizon half-way between
the lower bound and the shortest schedule seen; a try that leaves more of it is kept with probability
exp(-excess / temperature), and the temperature falls (Kirkpatrick, Gelatt and Vecchi, Science 1983). When nothing is
left above the horizon, the next one lies lower.

One run is one cooling; ``improvers.Annealing`` makes them longer and hotter, every other one on the time-reversed
problem: what is hard to fit last is then placed first.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from arachnec.solver.bound import lower_bound
from arachnec.solver.budget import OPERATIONS_PER_MS
from arachnec.solver.decoder import Decoder, start_order
from arachnec.solver.list_schedule import nearest_order
from arachnec.solver.problem import Problem, Schedule

# Tries per job of the longest runs. All end at a temperature of the mean area of a job divided by that.
TRIES = 1000
# Of the mean area of a job, the temperature at which the longest runs begin: hotter ones forget where they started.
HOT = 0.2
# Kinds of runs; each shorter one has so many times fewer tries, and is as much cooler.
KINDS, COOLER = 3, 4.0

Undo = list[tuple[bool, int, int]]  # whether it moved; the job; its pick or position before


class Cooling:
    """One run of annealing; ``best`` is the shortest schedule seen and ``least`` its makespan."""

    def __init__(self, problem: Problem, start: Schedule, bound: int, rng: random.Random, hot: float) -> None:
        self.problem, self.bound, self.rng, self.hot = problem, bound, rng, hot
        self.best, self.least = start, start.makespan(problem)
        self.decoder = Decoder(problem, start.picks, start_order(start))
        self.moldable = [j for j, job in enumerate(problem.jobs) if len(job.choices) > 1]
        self._keep_if_shortest()
        self._aim()

    def run(self, used: Callable[[int], float]) -> Schedule:
        """Until the bound is met, or ``used(tries)``, the part of the effort that is spent, is 1."""
        rng, decoder = self.rng, self.decoder
        tries, temperature = 0, 0.0
        every = max(1, OPERATIONS_PER_MS // len(self.problem.jobs))
        mean_area = decoder.area / len(self.problem.jobs)
        while self.least > self.bound:
            if tries % every == 0:
                spent = used(tries)
                if spent >= 1:
                    break
                temperature = mean_area * self.hot * (1 / (TRIES * self.hot)) ** spent
            tries += 1
            undo = self._change()
            if not undo:
                continue
            first = min(min(decoder.position[job], old) if moved else decoder.position[job] for moved, job, old in undo)
            limit = decoder.now.above - temperature * math.log(1 - rng.random())
            decoded = decoder.decode(first, limit)
            if decoded is None:
                self._revert(undo)
                continue
            decoder.now = decoded
            if decoded.last < self.least:
                self._keep_if_shortest()
                if decoded.above == 0:
                    self._aim()
        return self.best

    def _aim(self) -> None:
        self.decoder.aim(min((self.bound + self.least) // 2, self.least - 1))

    def _keep_if_shortest(self) -> None:
        if self.decoder.now.last < self.least:
            self.best, self.least = self.decoder.schedule(), self.decoder.now.last

    def _change(self) -> Undo:
        """One or two jobs at another degree, or one elsewhere in the order; what that changed. All chances are even."""
        rng, decoder = self.rng, self.decoder
        undo: Undo = []
        late = coin(rng)
        if self.moldable and coin(rng):
            job = self._late() if late else rng.choice(self.moldable)
            self._reshape(job, undo)
            if coin(rng):
                near = decoder.before[job] + decoder.after[job]
                self._reshape(rng.choice(near if near and coin(rng) else self.moldable), undo)
        else:
            self._shift(self._late() if late else rng.randrange(len(decoder.order)), undo)
        return undo

    def _reshape(self, job: int, undo: Undo) -> None:
        old = self.decoder.picks[job]
        new = another(self.rng, old, 0, len(self.problem.jobs[job].choices) - 1)
        if new != old:
            undo.append((False, job, old))
            self.decoder.set_pick(job, new)

    def _shift(self, job: int, undo: Undo) -> None:
        old = self.decoder.position[job]
        new = another(self.rng, old, *self.decoder.span(job))
        if new != old:
            undo.append((True, job, old))
            self.decoder.move(job, new)

    def _revert(self, undo: Undo) -> None:
        for moved, job, old in reversed(undo):
            if moved:
                self.decoder.move(job, old)
            else:
                self.decoder.set_pick(job, old)

    def _late(self) -> int:
        """A job that ends last, or one some steps back on a chain of jobs each of which starts as another ends."""
        rng, ends, ticks = self.rng, self.decoder.now.ends, self.decoder.ticks
        job = ends.index(self.decoder.now.last)
        while coin(rng):
            start = ends[job] - ticks[job]
            if start not in ends:
                break
            job = ends.index(start)
        return job


def anneal(
    problem: Problem,
    start: Schedule,
    rng: random.Random,
    used: Callable[[int], float],
    *,
    bound: int | None = None,
    hot: float = HOT,
) -> Schedule:
    """The shortest schedule seen in one cooling; ``used(tries)`` is the part of the effort that is spent, 1 at the end.

    ``bound`` is a lower bound in ticks, by default the area bound.
    """
    if not problem.jobs or used(0) >= 1:
        return start
    return Cooling(problem, start, lower_bound(problem) if bound is None else bound, rng, hot).run(used)


def neighbour(
    problem: Problem, picks: Sequence[int], order: list[int], rng: random.Random
) -> tuple[list[int], list[int]]:
    """One or two jobs at another degree, or one elsewhere in the order."""
    changed, wished = list(picks), list(order)
    if coin(rng):
        for _ in range(1 + coin(rng)):
            job = rng.randrange(len(changed))
            changed[job] = another(rng, changed[job], 0, len(problem.jobs[job].choices) - 1)
    else:
        old = rng.randrange(len(wished))
        wished.insert(another(rng, old, 0, len(wished) - 1), wished.pop(old))
        wished = list(nearest_order(problem, wished))
    return changed, wished


def another(rng: random.Random, old: int, first: int, last: int) -> int:
    """A number from ``first`` to ``last``: next to the old one, or any."""
    return min(max(old + rng.choice((-1, 1)), first), last) if coin(rng) else rng.randint(first, last)


def coin(rng: random.Random) -> bool:
    return rng.random() < 0.5
