"""Large-neighbourhood search on a packing: a few blocks are emptied and packed anew, again and again.

The horizon is half-way between the bound and what is reached. A try takes a block that reaches above it and some
others, lifts the jobs that lie inside them, and packs those by best fit in a perturbed order. The result stays if less
reaches above the horizon than before, or as much and no more area is used. Where many tries in turn fail, the horizon
comes half as near to what is reached.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from arachnec.solver.block_packing import Options, Packing, Placed, fit, frugal
from arachnec.solver.budget import Clock
from arachnec.solver.problem import Problem

# Of a GPU and of a job in a try.
TRY_MS = 0.0047
# Tries in a row without progress, after which the horizon comes nearer.
STALL = 150
# Of a job's length, by which its place in the order may change, at most.
PERTURBED = 0.6
# Blocks that are looked at, and that are packed anew, at most; two where these would have more GPUs than that: larger
# windows cost more than they gain.
BLOCKS, WINDOW = 4, 32
# ms of as many tries in windows of that size: less says nothing.
LEAST_MS = STALL * TRY_MS * WINDOW


class LargeNeighbourhood:
    """One search; its packing changes in place."""

    def __init__(self, problem: Problem, options: Options, packing: Packing, bound: int, rng: random.Random) -> None:
        self.problem, self.options, self.bound = problem, options, bound
        self.rng = rng
        self.load = list(packing.load)
        self.early = [placed for placed in packing.placed if problem.after[placed.job]]
        self.at: list[list[Placed]] = [[] for _ in range(problem.gpus)]
        for placed in packing.placed:
            if not problem.after[placed.job]:
                self.at[placed.first].append(placed)
        widest = max((option.width for row in options for option in row), default=1)
        doubling = tuple(1 << exponent for exponent in range(1, problem.gpus.bit_length()))
        widths = problem.widths[1:] if problem.widths is not None else doubling
        self.widths = [width for width in widths if width <= min(widest, problem.gpus)] or [1]
        self.failed = 0
        self.halvings = 1  # of the gap, to where the horizon is
        self.reached = max(self.load, default=0)
        self._aim()

    def packing(self) -> Packing:
        late = [placed for row in self.at for placed in row]
        return Packing((*self.early, *late), tuple(self.load))

    def run(self, clock: Clock) -> bool:
        """Tries until the packing is shorter (True), the bound is met, or the time is over."""
        while self.reached > self.bound and clock.any_left():
            if self._try(clock):
                self.failed = 0
            else:
                self.failed += 1
            if self.failed > STALL:
                self.failed = 0
                self.halvings += 1
                self._aim()
            if not self.over:
                self.halvings = 1
                self._aim()
                return True
        return False

    def _aim(self) -> None:
        # A move that leaves as much above the horizon may raise the longest load: what was reached before counts.
        self.reached = min(self.reached, max(self.load, default=0))
        self.horizon = self.reached - max(1, (self.reached - self.bound) >> self.halvings)
        self.over = [gpu for gpu, ticks in enumerate(self.load) if ticks > self.horizon]

    def _try(self, clock: Clock) -> bool:
        rng = self.rng
        width = rng.choice(self.widths)
        window = self._window(width, rng.randint(2, min(BLOCKS, max(2, WINDOW // width))))
        if window is None:
            clock.count(1)
            return False
        before = [self.load[gpu] for gpu in window]
        lifted, base = self._lift(window, width, before)
        clock.count_ms(TRY_MS * (len(window) + len(lifted)))
        excess = sum(ticks - self.horizon for ticks in before if ticks > self.horizon)
        area = sum(placed.option.width * placed.option.ticks for placed in lifted)
        noise = PERTURBED * rng.random()
        wished = []
        for placed in lifted:
            option = frugal(self.options[placed.job], self.horizon - self.problem.heads[placed.job], width)
            wished.append((option.ticks * (1 - noise * rng.random()), placed.job, option))
        wished.sort(key=lambda row: (-row[0], row[1]))
        load = list(base)
        packed = fit([(option, j) for _, j, option in wished], self.options, load, self.horizon, width)
        left = sum(ticks - self.horizon for ticks in load if ticks > self.horizon)
        used = sum(placed.option.width * placed.option.ticks for placed in packed)
        if left < excess or (left == excess and used <= area):
            self._keep(window, width, load, packed)
            return left < excess
        return False

    def _window(self, width: int, count: int) -> list[int] | None:
        """The GPUs of a block that reaches above the horizon and of others, mostly emptier ones."""
        rng, blocks = self.rng, self.problem.gpus // width
        worst = rng.choice(self.over) // width
        if worst >= blocks:
            return None
        chosen = [worst]
        while len(chosen) < min(count, blocks):
            block = rng.randrange(blocks)
            if rng.random() < 0.5:
                some = [block, *(rng.randrange(blocks) for _ in range(BLOCKS - 1))]
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

    def _keep(self, window: Sequence[int], width: int, load: Sequence[int], packed: Sequence[Placed]) -> None:
        """``packed`` has blocks by their index in the window."""
        for gpu, ticks in zip(window, load, strict=True):
            self.load[gpu] = ticks
            self.at[gpu] = [placed for placed in self.at[gpu] if placed.option.width > width]
        for placed in packed:
            first = window[placed.first]
            self.at[first].append(Placed(placed.job, placed.option, first))
        self.over = [gpu for gpu, ticks in enumerate(self.load) if ticks > self.horizon]
