"""The one way into Z3: a question has a solver of its own, a seed, a limit, and an answer; another thread may stop it.

A question that its limit cut off may be allowed more, and goes on with all that its solver has learnt.

Making the question counts as much as answering it: ``late`` says while it is made that its time is over.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from enum import Enum
from typing import TypeVar

import z3

from arachnec.solver.problem import Effort

T = TypeVar("T")


class Answer(Enum):
    POSSIBLE = "possible"
    IMPOSSIBLE = "impossible"
    UNKNOWN = "unknown"


class Question:
    """One question at a time; ``steps`` is what Z3 has counted for all that it was asked."""

    def __init__(self) -> None:
        self.stopped = False
        self.steps = 0
        self._context: z3.Context | None = None
        self._interrupted: z3.Context | None = None

    def begin(self, effort: Effort, seed: int, make: Callable[..., z3.Solver] = z3.Solver) -> z3.Solver:
        """A solver in a context of its own. ``z3.Solver`` itself begins anew whenever it is asked again."""
        self.allow(effort)
        self._context = z3.Context()
        solver = make(ctx=self._context)
        solver.set("random_seed", seed % 2**31)
        return solver

    def allow(self, effort: Effort) -> None:
        """So much from now on, whoever stopped it before."""
        self.stopped = False
        self._most = None if effort.steps is None else self.steps + effort.steps
        self._until = None if effort.wall_ms is None else time.perf_counter() + effort.wall_ms / 1e3

    def late(self) -> bool:
        return self.stopped or (self._until is not None and time.perf_counter() > self._until)

    def left(self) -> Effort:
        """What is left of the effort."""
        steps = None if self._most is None else max(1, self._most - self.steps)
        wall = None if self._until is None else max(1, int((self._until - time.perf_counter()) * 1e3))
        return Effort(steps, wall)

    def check(self, solver: z3.Solver, *assumptions: z3.BoolRef, steps: int = 0) -> Answer:
        """The answer within what is left of the effort; where ``steps`` are given, within so many."""
        if self.late():
            return Answer.UNKNOWN
        before = _counted(solver)
        if self._most is not None:
            if self.steps >= self._most:
                return Answer.UNKNOWN
            steps = min(steps or self._most, self._most - self.steps)
        solver.set("rlimit", steps)  # 0 is no limit
        if self._until is not None:
            solver.set("timeout", max(1, int((self._until - time.perf_counter()) * 1e3)))
        answer = solver.check(*assumptions)
        self.steps += max(1, _counted(solver) - before)
        if answer == z3.sat:
            return Answer.POSSIBLE
        return Answer.IMPOSSIBLE if answer == z3.unsat else Answer.UNKNOWN

    def core(self, solver: z3.Solver, steps: int) -> list[z3.BoolRef]:
        """Of the assumptions just refused some that are refused alone; none of them can be spared, as far as was seen.

        One after the other is left out, each for ``steps``. Z3's own ``core.minimize`` knows no limit: it went on for
        six seconds after a check of one.
        """
        core = list(solver.unsat_core())
        for assumption in list(core):
            fewer = [other for other in core if not other.eq(assumption)]
            if len(fewer) < len(core) and self.check(solver, *fewer, steps=steps) is Answer.IMPOSSIBLE:
                core = list(solver.unsat_core())
        return core

    def answered(self, ask: Callable[[], tuple[Answer, T | None]]) -> tuple[Answer, T | None]:
        """What ``ask`` answers; unknown where this was stopped, be it while constraints are made or a model is read.

        An interrupt that comes behind the end of one answer cancels the next, which nobody stopped. Where it meets Z3
        as it makes a constraint, the error is that of whatever comes to use what was not made.
        """
        try:
            return ask()
        except z3.Z3Exception as error:
            interrupted, self._interrupted = self._interrupted, None
            if self.stopped or "canceled" in str(error) or (interrupted is not None and interrupted is self._context):
                return Answer.UNKNOWN, None
            raise

    def stop(self) -> None:
        """From another thread: nobody waits for the answer any more."""
        self.stopped = True
        self._interrupted = context = self._context
        if context is not None:
            with contextlib.suppress(z3.Z3Exception):  # it tells the error of the call that it interrupts, if any
                context.interrupt()


def _counted(solver: z3.Solver) -> int:
    counts = solver.statistics()
    return next((int(counts[index][1]) for index in range(len(counts)) if counts[index][0] == "rlimit count"), 0)


def true(model: z3.ModelRef, boolean: z3.BoolRef) -> bool:
    return bool(z3.is_true(model.eval(boolean, model_completion=True)))
