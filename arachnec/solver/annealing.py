"""Simulated annealing over degrees and order, decoded by list scheduling (``solver.decoder``).

A try changes degrees or moves a job in the order. What is minimised is the GPU time above a horizon half-way between
the lower bound and the shortest schedule seen; a try that leaves more of it is kept with probability
exp(-excess / temperature), and the temperature falls (Kirkpatrick, Gelatt and Vecchi, Science 1983). When nothing is
left above the horizon, the next one lies lower.

``cool`` does that once. ``anneal_by_turns`` does it again and again from the shortest schedule seen, every other time
from its end to its beginning: what is hard to fit last is then placed first.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from arachnec.solver.bound import lower_bound
from arachnec.solver.decoder import Decoder, reversed_problem, reversed_schedule, start_order
from arachnec.solver.list_schedule import nearest_order
from arachnec.solver.problem import Problem, Schedule

HOT, COLD = 0.2, 0.002  # of the mean area of a job: the temperature at first and at last
PARTS = (0.5, 0.8, 0.95)  # of the way from the bound to the shortest makespan: the horizon of each cooling
COOLINGS = ((0.002, 50), (0.02, 200), (HOT, 1000))  # how hot, and tries per job; the last one again and again
STEPS = (-4, -2, -1, 1, 2, 4)  # places by which a degree changes
NEAR = (-3, -2, -1, 1, 2, 3)  # places by which a job moves in the order
LATEST = 0.1  # of the tries change a job that ends last, or what it waits for
OFTEN = 1000  # jobs decoded, after which the effort is asked for

Undo = list[tuple[bool, int, int]]  # whether it moved; the job; its pick or position before


class Cooling:
    """One run of annealing; ``best`` is the shortest schedule seen and ``least`` its makespan."""

    def __init__(
        self, problem: Problem, start: Schedule, bound: int, dice: random.Random, part: float, hot: float
    ) -> None:
        self.problem, self.bound, self.dice, self.part, self.hot = problem, bound, dice, part, hot
        self.best, self.least = start, start.makespan(problem)
        self.decoder = Decoder(problem, start.picks, start_order(start))
        self.moldable = [j for j, job in enumerate(problem.jobs) if len(job.choices) > 1]
        self._keep_if_shortest()
        self._aim()

    def run(self, used: Callable[[int], float]) -> Schedule:
        """Until the bound is met, or ``used(tries)``, the part of the effort that is spent, is 1."""
        dice, decoder = self.dice, self.decoder
        tries, temperature = 0, 0.0
        every = max(1, OFTEN // len(self.problem.jobs))
        mean_area = decoder.area / len(self.problem.jobs)
        while self.least > self.bound:
            if tries % every == 0:
                spent = used(tries)
                if spent >= 1:
                    break
                temperature = mean_area * self.hot * (min(COLD, self.hot) / self.hot) ** spent
            tries += 1
            undo = self._change()
            if not undo:
                continue
            first = min(min(decoder.position[job], old) if moved else decoder.position[job] for moved, job, old in undo)
            limit = decoder.now.above - temperature * math.log(1 - dice.random())
            found = decoder.decode(first, limit)
            if found is None:
                self._revert(undo)
                continue
            decoder.now = found
            if found.last < self.least:
                self._keep_if_shortest()
                if found.above == 0:
                    self._aim()
        return self.best

    def _aim(self) -> None:
        self.decoder.aim(min(int(self.bound + (self.least - self.bound) * self.part), self.least - 1))

    def _keep_if_shortest(self) -> None:
        if self.decoder.now.last < self.least:
            self.best, self.least = self.decoder.schedule(), self.decoder.now.last

    def _change(self) -> Undo:
        """One or two jobs at another degree, or one elsewhere in the order, or both; what that changed."""
        dice, decoder = self.dice, self.decoder
        undo: Undo = []
        kind, late = dice.random(), dice.random() < LATEST
        if kind < 0.6 and self.moldable:
            job = self._late() if late else dice.choice(self.moldable)
            self._reshape(job, undo)
            if kind < 0.2:
                near = decoder.before[job] + decoder.after[job]
                self._reshape(dice.choice(near if near and dice.random() < 0.5 else self.moldable), undo)
        if kind > 0.45:
            self._shift(self._late() if late else dice.randrange(len(decoder.order)), undo)
        return undo

    def _reshape(self, job: int, undo: Undo) -> None:
        dice, old = self.dice, self.decoder.picks[job]
        last = len(self.problem.jobs[job].choices) - 1
        new = old + dice.choice((-1, 1)) if dice.random() < 0.8 else dice.randint(0, last)
        if 0 <= new <= last and new != old:
            undo.append((False, job, old))
            self.decoder.set_pick(job, new)

    def _shift(self, job: int, undo: Undo) -> None:
        dice, old = self.dice, self.decoder.position[job]
        first, last = self.decoder.span(job)
        new = min(max(old + dice.choice(NEAR), first), last) if dice.random() < 0.5 else dice.randint(first, last)
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
        dice, ends, ticks = self.dice, self.decoder.now.ends, self.decoder.ticks
        job = ends.index(self.decoder.now.last)
        for _ in range(dice.randrange(2 + len(ends) // 4)):
            start = ends[job] - ticks[job]
            if start not in ends:
                break
            job = ends.index(start)
        return job


def anneal(
    problem: Problem,
    start: Schedule,
    dice: random.Random,
    used: Callable[[int], float],
    *,
    bound: int | None = None,
    part: float = PARTS[0],
    hot: float = HOT,
) -> Schedule:
    """The shortest schedule seen in one cooling; ``used(tries)`` is the part of the effort that is spent, 1 at the end.

    ``bound`` is a lower bound in ticks, by default the area bound.
    """
    if not problem.jobs or used(0) >= 1:
        return start
    return Cooling(problem, start, lower_bound(problem) if bound is None else bound, dice, part, hot).run(used)


def anneal_by_turns(
    problem: Problem, start: Schedule, bound: int, dice: random.Random, used: Callable[[int], float]
) -> Schedule:
    """One cooling after the other, each from the shortest schedule so far, every second from its end backwards."""
    turned, best, before, turn = reversed_problem(problem), start, 0, 0
    while (spent := used(before)) < 1 and best.makespan(problem) > bound:
        tries = 0
        part = PARTS[turn % len(PARTS)]
        hot, per_job = COOLINGS[min(turn, len(COOLINGS) - 1)]
        most = per_job * max(1, len(problem.jobs))

        def used_of_this(count: int, before: int = before, spent: float = spent, most: int = most) -> float:
            nonlocal tries
            tries = count
            now = used(before + count)
            return 1.0 if now >= 1 else max(count / most, (now - spent) / (1 - spent))

        if turn % 2:
            found = anneal(
                turned, reversed_schedule(problem, best), dice, used_of_this, bound=bound, part=part, hot=hot
            )
            best = reversed_schedule(turned, found)
        else:
            best = anneal(problem, best, dice, used_of_this, bound=bound, part=part, hot=hot)
        before, turn = before + max(1, tries), turn + 1
    return best


def neighbour(
    problem: Problem, picks: Sequence[int], order: list[int], dice: random.Random
) -> tuple[list[int], list[int]]:
    """One or two jobs at another degree, or one elsewhere in the order, or both."""
    changed, wished = list(picks), list(order)
    both = dice.random()
    if both < 0.7:
        for _ in range(dice.choice((1, 1, 2))):
            j = dice.randrange(len(changed))
            last = len(problem.jobs[j].choices) - 1
            step = dice.choice(STEPS)
            changed[j] = min(max(changed[j] + step, 0), last) if dice.random() < 0.8 else dice.randint(0, last)
    if both > 0.4:
        wished.insert(dice.randrange(len(wished)), wished.pop(dice.randrange(len(wished))))
        wished = list(nearest_order(problem, wished))
    return changed, wished
