"""Schedules in aligned blocks: a job of degree d = 1, 2, 4, ... holds d neighbouring GPUs from a multiple of d on.

(Any widths of which each divides the next will do: ``solver.widths``.)

With such blocks nested in each other and nothing waiting for anything, no start time needs to be searched: every GPU
runs its wide jobs before its narrow ones, all of a block at once, and the makespan is the largest sum of ticks over
the blocks that hold a GPU. What is left is a packing: best fit by falling length, up to a horizon a little above the
bound (Johnson 1973; here bins are GPUs and items may be wider than one).

Where jobs wait for others, those come first, longest chains first, each where it can start first. The jobs that nothing
waits for are packed above them and run in the mirrored order, narrow before wide, so that all GPUs end together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from arachnec.solver.bound import horizons
from arachnec.solver.problem import Problem, Schedule

# GPUs up to which plain loops are faster than arrays.
SMALL = 48


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a job: choice ``pick`` holds an aligned block of ``width`` GPUs for ``ticks``."""

    width: int
    ticks: int
    pick: int


Options: TypeAlias = tuple[tuple[Option, ...], ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """A job on the block of GPUs that starts at ``first``."""

    job: int
    option: Option
    first: int


@dataclass(frozen=True)
class Packing:
    """Where every job is; ``load`` has the ticks of every GPU."""

    placed: tuple[Placed, ...]
    load: tuple[int, ...]


def options_of(problem: Problem) -> Options | None:
    """Per job its choices of a block's width, else all on the next wider block; None where a job fits no block."""
    degrees = {choice.degree for job in problem.jobs for choice in job.choices}
    widths = {degree: _width(problem, degree) for degree in degrees}
    memo: dict[int, tuple[Option, ...]] = {}
    rows = []
    for job in problem.jobs:
        if id(job.choices) not in memo:
            choices = [(widths[c.degree], c, k) for k, c in enumerate(job.choices) if widths[c.degree] <= problem.gpus]
            exact = [choice for choice in choices if choice[0] == choice[1].degree]
            memo[id(job.choices)] = tuple([Option(width, c.ticks, k) for width, c, k in exact or choices])
        options = memo[id(job.choices)]
        if not options:
            return None
        rows.append(options)
    return tuple(rows)


def _width(problem: Problem, degree: int) -> int:
    """The narrowest block that holds so many GPUs; wider than all GPUs where there is none."""
    if problem.widths is None:
        return 1 << (degree - 1).bit_length()
    return next((width for width in problem.widths if width >= degree), problem.gpus + 1)


def packings(problem: Problem, options: Options, bound: int) -> Iterator[Packing]:
    """Each shorter than the last, for horizons from the bound upwards, until the shortest keeps below its own."""
    chained = any(job.before for job in problem.jobs)
    areas = sum(min(option.width * option.ticks for option in row) for row in options)
    shortest = None
    for horizon in horizons(max(bound, areas // problem.gpus)):  # blocks may waste GPUs
        packing = pack(problem, options, int(horizon))
        length = realize(problem, packing).makespan(problem) if chained else max(packing.load)
        if shortest is None or length < shortest:
            shortest = length
            yield packing
        if shortest <= horizon:
            return


def pack(problem: Problem, options: Options, horizon: int) -> Packing:
    """Best fit of all jobs up to ``horizon`` ticks; what does not fit goes where it reaches above it least."""
    load = [0] * problem.gpus
    first = [j for j in range(len(problem.jobs)) if problem.after[j]]
    last = [j for j in range(len(problem.jobs)) if not problem.after[j]]
    heads, tails = problem.heads, problem.tails
    chosen = {j: _of_chain(problem, options, horizon, j) for j in last}
    room = {j: horizon - heads[j] - tails[j] for j in first}  # ticks that each may take
    for j, option in chosen.items():
        for i in problem.jobs[j].before:
            room[i] = min(room[i], horizon - heads[i] - option.ticks)
    urgent = {j: min((horizon - chosen[i].ticks for i in problem.after[j] if i in chosen), default=0) for j in first}
    placed = []
    for j in sorted(first, key=lambda j: (heads[j], urgent[j], -tails[j], j)):
        option = frugal(options[j], room[j], problem.gpus)
        block = lowest_block(load, option.width)
        hold(load, block, option)
        placed.append(Placed(j, option, block))
    wished = [(chosen[j], j) for j in last]
    wished.sort(key=lambda pair: (-pair[0].ticks, -pair[0].width, pair[1]))
    if problem.gpus > SMALL:
        placed += _fit_arrays(wished, options, load, horizon)
    else:
        placed += fit(wished, options, load, horizon, problem.gpus)
    return Packing(tuple(placed), tuple(load))


def _of_chain(problem: Problem, options: Options, horizon: int, j: int) -> Option:
    """The option of a job that makes it and what it waits for, one after the other by the horizon, least area."""
    before = problem.jobs[j].before
    if not before:
        return frugal(options[j], horizon, problem.gpus)
    best, least = None, 0
    for option in options[j]:
        area = option.width * option.ticks
        for i in before:
            left = horizon - option.ticks - problem.heads[i]
            quick = [other.width * other.ticks for other in options[i] if other.ticks <= left]
            if not quick:
                break
            area += min(quick)
        else:
            if best is None or area < least:
                best, least = option, area
    return best if best is not None else frugal(options[j], horizon - problem.heads[j], problem.gpus)


def frugal(options: Sequence[Option], ticks: int, widest: int) -> Option:
    """The option of least area that takes at most ``ticks``; else the shortest."""
    able = [option for option in options if option.width <= widest]
    quick = [option for option in able if option.ticks <= ticks]
    if quick:
        return min(quick, key=lambda option: option.width * option.ticks)
    return min(able, key=lambda option: option.ticks)


def hold(load: list[int], first: int, option: Option) -> None:
    for gpu in range(first, first + option.width):
        load[gpu] += option.ticks


def lowest_block(load: Sequence[int], width: int) -> int:
    """The block that is free first."""
    if width == 1:
        return min(range(len(load)), key=load.__getitem__)
    return min(range(0, len(load) - width + 1, width), key=lambda first: max(load[first : first + width]))


def fit(
    wished: Sequence[tuple[Option, int]], options: Options, load: list[int], horizon: int, widest: int
) -> list[Placed]:
    """Jobs in this order, each on the fullest block that holds it, else with another option; ``load`` grows."""
    placed = []
    for option, j in wished:
        first, reached = best_block(load, option, horizon)
        if reached > horizon:
            for other in options[j]:
                if other.width <= widest:
                    block, top = best_block(load, other, horizon)
                    if _better(other, top, option, reached, horizon):
                        option, first, reached = other, block, top
        hold(load, first, option)
        placed.append(Placed(j, option, first))
    return placed


def _better(new: Option, top: int, old: Option, reached: int, horizon: int) -> bool:
    """Less above the horizon, else less area."""
    return (max(top, horizon), new.width * new.ticks) < (max(reached, horizon), old.width * old.ticks)


def best_block(load: Sequence[int], option: Option, horizon: int) -> tuple[int, int]:
    """The fullest block on which the option ends by the horizon, else the emptiest; and where it ends there."""
    width, room = option.width, horizon - option.ticks
    best, fullest, lowest, least = -1, -1, 0, 1 << 62
    if width == 1:
        for first, top in enumerate(load):
            if fullest < top <= room:
                best, fullest = first, top
            if top < least:
                lowest, least = first, top
    else:
        for first in range(0, len(load) - width + 1, width):
            block = load[first : first + width]
            top = max(block)
            if top <= room and (total := sum(block)) > fullest:
                best, fullest = first, total
            if top < least:
                lowest, least = first, top
        if best >= 0:
            return best, max(load[best : best + width]) + option.ticks
    return (best, fullest + option.ticks) if best >= 0 else (lowest, least + option.ticks)


def _fit_arrays(wished: Sequence[tuple[Option, int]], options: Options, load: list[int], horizon: int) -> list[Placed]:
    """``fit`` with arrays: the same rule for many GPUs."""
    import numpy as np

    most = sum(load) + sum(max(option.width * option.ticks for option in options[j]) for _, j in wished)
    loads = np.array(load, dtype=np.int64 if most < np.iinfo(np.int64).max else object)
    gpus = len(load)

    def block_of(option: Option) -> tuple[int, int]:
        width, room = option.width, horizon - option.ticks
        if width == 1:
            tops = sums = loads
        else:
            rows = loads[: gpus - gpus % width].reshape(-1, width)
            tops, sums = rows.max(axis=1), rows.sum(axis=1)
        best = int(np.where(tops <= room, sums, -1).argmax())
        if tops[best] > room:
            best = int(tops.argmin())
        return best * width, int(tops[best]) + option.ticks

    placed = []
    for option, j in wished:
        first, reached = block_of(option)
        if reached > horizon:
            for other in options[j]:
                block, top = block_of(other)
                if _better(other, top, option, reached, horizon):
                    option, first, reached = other, block, top
        loads[first : first + option.width] += option.ticks
        placed.append(Placed(j, option, first))
    load[:] = loads.tolist()
    return placed


def realize(problem: Problem, packing: Packing) -> Schedule:
    """Start times for a packing, on its own GPUs; as long as its largest load where nothing waits."""
    picks, starts, ends = [0] * len(problem.jobs), [0] * len(problem.jobs), [0] * len(problem.jobs)
    free = [0] * problem.gpus
    for placed in _order(problem, packing):
        block = slice(placed.first, placed.first + placed.option.width)
        ready = max((ends[j] for j in problem.jobs[placed.job].before), default=0)
        start = max(ready, *free[block])
        picks[placed.job], starts[placed.job] = placed.option.pick, start
        ends[placed.job] = start + placed.option.ticks
        free[block] = [ends[placed.job]] * placed.option.width
    return Schedule(tuple(picks), tuple(starts))


def _order(problem: Problem, packing: Packing) -> list[Placed]:
    wide_first = sorted(packing.placed, key=lambda placed: -placed.option.width)
    if not any(job.before for job in problem.jobs):
        return wide_first
    early = [placed for placed in packing.placed if problem.after[placed.job]]
    behind = [0] * problem.gpus
    late = []
    for placed in wide_first:
        if not problem.after[placed.job]:
            block = slice(placed.first, placed.first + placed.option.width)
            end = max(behind[block]) + placed.option.ticks
            behind[block] = [end] * placed.option.width
            late.append((-end, placed.job, placed))
    return early + [placed for _, _, placed in sorted(late, key=lambda row: row[:2])]
