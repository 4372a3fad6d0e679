"""Large-neighbourhood search on a packing: a few blocks are emptied and packed anew, again and again.

The horizon is set a little below what is reached. A try takes a block that reaches above it and some others, lifts the
jobs that lie inside them, and packs those by best fit in a perturbed order, some of them wider than they need be. The
result stays if less reaches above the horizon than before, or as much and no more area is used. Where many tries in
turn fail, Z3 is asked whether the jobs of two blocks fit below the horizon (``solver.z3_packing``).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from arachnec.solver.block_packing import Options, Packing, Placed, fit, frugal, hold
from arachnec.solver.problem import Problem

STALL = 150  # tries without progress
MOST_FREE = 26  # jobs in one question to Z3
WIDTHS = (2, 4, 8, 8, 16, 32, 64, 128)  # of the blocks that are packed anew, unless the problem has its own
NARROW = 8  # GPUs: of blocks up to this width more than two are packed at once
PERTURBED = (0.0, 0.1, 0.3, 0.6)  # of a job's length, by which its place in the order may change
WIDENED = (0.0, 0.0, 0.05, 0.15)  # of the jobs

Ask = Callable[[Sequence[int], Sequence[int], int, int], "Sequence[Placed] | None"]


class Repacking:
    """One search; its packing changes in place."""

    def __init__(
        self,
        problem: Problem,
        options: Options,
        packing: Packing,
        bound: int,
        *,
        seed: int,
        ask: Ask | None = None,
    ) -> None:
        self.problem, self.options, self.bound, self.ask = problem, options, bound, ask
        self.dice = random.Random(seed)
        self.load = list(packing.load)
        self.early = [placed for placed in packing.placed if problem.after[placed.job]]
        self.at: list[list[Placed]] = [[] for _ in range(problem.gpus)]
        for placed in packing.placed:
            if not problem.after[placed.job]:
                self.at[placed.first].append(placed)
        widest = max((option.width for row in options for option in row), default=1)
        widths = problem.widths[1:] if problem.widths is not None else WIDTHS
        self.widths = [width for width in widths if width <= min(widest, problem.gpus)] or [1]
        self.part = 0.5  # of the gap that the horizon leaves
        self._aim()

    def packing(self) -> Packing:
        late = [placed for row in self.at for placed in row]
        return Packing((*self.early, *late), tuple(self.load))

    def run(self, stop: Callable[[], bool]) -> bool:
        """Tries until the packing is shorter (True), the bound is met, or ``stop`` says so, asked once per try."""
        failed = 0
        while self.reached > self.bound and not stop():
            if self._try():
                failed = 0
            else:
                failed += 1
            if failed > STALL:
                failed = 0
                if self.part < 0.9:
                    self.part += (1 - self.part) * 0.3
                    self._aim()
                elif self.ask is not None:
                    self._question()
            if not self.over:
                self.part = max(0.3, self.part * 0.9)
                self._aim()
                return True
        return False

    def _aim(self) -> None:
        self.reached = max(self.load, default=0)
        self.horizon = min(int(self.bound + (self.reached - self.bound) * self.part), self.reached - 1)
        self.over = [gpu for gpu, ticks in enumerate(self.load) if ticks > self.horizon]

    def _try(self) -> bool:
        dice = self.dice
        width = dice.choice(self.widths)
        window = self._window(width, dice.choice((2, 3, 4)) if width <= NARROW else 2)
        if window is None:
            return False
        before = [self.load[gpu] for gpu in window]
        lifted, base = self._lift(window, width, before)
        excess = sum(ticks - self.horizon for ticks in before if ticks > self.horizon)
        area = sum(placed.option.width * placed.option.ticks for placed in lifted)
        noise, widen = dice.choice(PERTURBED), dice.choice(WIDENED)
        wished = []
        for placed in lifted:
            options = self.options[placed.job]
            option = frugal(options, self.horizon - self.problem.heads[placed.job], width)
            if widen and dice.random() < widen:
                option = next((o for o in options if option.width < o.width <= width), option)
            wished.append((option.ticks * (1 - noise * dice.random()), placed.job, option))
        wished.sort(key=lambda row: (-row[0], row[1]))
        load = list(base)
        found = fit([(option, j) for _, j, option in wished], self.options, load, self.horizon, width)
        left = sum(ticks - self.horizon for ticks in load if ticks > self.horizon)
        used = sum(placed.option.width * placed.option.ticks for placed in found)
        if left < excess or (left == excess and used <= area):
            self._keep(window, width, load, found)
            return left < excess
        return False

    def _window(self, width: int, count: int) -> list[int] | None:
        """The GPUs of a block that reaches above the horizon and of others, mostly emptier ones."""
        dice, blocks = self.dice, self.problem.gpus // width
        worst = dice.choice(self.over) // width
        if worst >= blocks:
            return None
        chosen = [worst]
        while len(chosen) < min(count, blocks):
            block = dice.randrange(blocks)
            if dice.random() < 0.5:
                some = [block, *(dice.randrange(blocks) for _ in range(3))]
                block = min(some, key=lambda b: sum(self.load[b * width : (b + 1) * width]))
            if block not in chosen:
                chosen.append(block)
        return [gpu for block in chosen for gpu in range(block * width, (block + 1) * width)]

    def _lift(self, window: Sequence[int], width: int, before: Sequence[int]) -> tuple[list[Placed], list[int]]:
        """The jobs that lie inside the window's blocks, and the load without them."""
        base, lifted = list(before), []
        for index, gpu in enumerate(window):
            for placed in self.at[gpu]:
                if placed.option.width <= width:
                    lifted.append(placed)
                    for inside in range(index, index + placed.option.width):
                        base[inside] -= placed.option.ticks
        return lifted, base

    def _keep(self, window: Sequence[int], width: int, load: Sequence[int], found: Sequence[Placed]) -> None:
        """``found`` has blocks by their index in the window."""
        for gpu, ticks in zip(window, load, strict=True):
            self.load[gpu] = ticks
            self.at[gpu] = [placed for placed in self.at[gpu] if placed.option.width > width]
        for placed in found:
            first = window[placed.first]
            self.at[first].append(Placed(placed.job, placed.option, first))
        self.over = [gpu for gpu, ticks in enumerate(self.load) if ticks > self.horizon]

    def _question(self) -> None:
        """Z3 on two blocks: the widest that its limit of jobs allows."""
        assert self.ask is not None
        for width in reversed(self.widths):
            window = self._window(width, 2)
            if window is None:
                continue
            lifted, base = self._lift(window, width, [self.load[gpu] for gpu in window])
            if len(lifted) <= MOST_FREE:
                found = self.ask([placed.job for placed in lifted], base, self.horizon, width)
                if found is not None:
                    load = list(base)
                    for placed in found:
                        hold(load, placed.first, placed.option)
                    self._keep(window, width, load, found)
                return
