"""The shortest packing of a few jobs in aligned blocks: dynamic programming over sets of jobs.

``_Block.finish[S]`` is when a block of GPUs can be done with the jobs S. Blocks nest (``block_packing``), so that
is what its two halves need for a partition of S less those jobs that hold the whole block, plus these, one after
another; and of two packings of the same jobs in the same block the one that ends first is never worse (Held and Karp,
1962).

What makes it fast is that area is scarce: a schedule that ends by the horizon leaves GPUs x horizon less every job's
least area, in all blocks together, to be spent on wider options and on waiting. A set on which a block spends more than
that is dropped, and two halves are joined only if their ends differ by less. So horizons are tried from the least area
upwards, with twice as much to spare each time, until there is a packing below one: that is the shortest of all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from arachnec.solver.block_packing import Option, Options, Packing, Placed, hold

Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

# Each doubles the sets: 2^20 numbers are 8 MB for every block.
MOST_JOBS = 20
# Of the area, that the first horizon leaves to spare; it doubles.
FIRST_SPARE = 0.001
# Of sets, compared at once: 5 to 10 ms.
PAIRS_AT_ONCE = 500_000
NEVER = 1 << 60  # ticks


def shortest_packing(
    gpus: int, options: Options, below: int, stop: Callable[[], bool] = lambda: False
) -> tuple[Packing | None, bool]:
    """The shortest packing that ends before ``below`` ticks, and whether it is certain that none is shorter.

    (None, True) says that there is none; (None, False) that there are too many jobs or sets, or that ``stop``, asked
    every few milliseconds, ended the search.
    """
    least = sum(min(option.width * option.ticks for option in row) for row in options)
    if gpus * (below - 1) < least:
        return None, True
    if not options or len(options) > MOST_JOBS or len(options) * gpus * below >= NEVER:
        return None, False
    spare = max(1, int(least * FIRST_SPARE))
    while True:
        horizon = min((least + spare) // gpus, below - 1)
        try:
            packing = _Sets(gpus, options, horizon, stop).packing()
        except _TooMuch:
            return None, False
        if packing is not None or horizon == below - 1:
            return packing, True
        spare *= 2


class _TooMuch(Exception):
    """More time than allowed."""


@dataclass(frozen=True)
class _Block:
    """What a block of ``width`` GPUs can do.

    ``finish`` has for every set of jobs the ticks at which it is done, NEVER where that is too late; ``joined`` the
    same for sets none of which holds the whole block. ``parts`` are the blocks it consists of; one GPU has none.
    """

    width: int
    finish: Numbers
    joined: Numbers
    parts: tuple[_Block, _Block] | None


class _Sets:
    """One horizon. Sets of jobs are numbers, job j their bit j."""

    def __init__(self, gpus: int, options: Options, horizon: int, stop: Callable[[], bool]) -> None:
        self.gpus, self.options, self.horizon, self.stop = gpus, options, horizon, stop
        least = [min(option.width * option.ticks for option in row) for row in options]
        self.area = _sums(least)  # of every set
        self.spare = gpus * horizon - int(self.area[-1])

    def packing(self) -> Packing | None:
        """The shortest; None where none ends by the horizon."""
        block = self._one_gpu()
        if self.gpus == 1:
            return self._packing(self._placed(block, len(self.area) - 1, 0)) if block.finish[-1] < NEVER else None
        blocks = [block]
        while 2 * block.width < self.gpus:
            block = self._with_wide(self._joined(block, block))
            blocks.append(block)
        # the last join is for sets alone that lack nothing but jobs that hold all GPUs
        *roots, last = [block for block in reversed(blocks) if self.gpus & block.width] or [block, block]
        first = roots[0]
        for root in roots[1:]:
            first = self._joined(first, root)
        whole = self._with_wide(self._joined(first, last, needed=self._never_on_all()))
        return self._packing(self._placed(whole, len(self.area) - 1, 0)) if whole.finish[-1] < NEVER else None

    def _one_gpu(self) -> _Block:
        finish = _sums([_ticks(row, 1) for row in self.options])
        finish[(finish > self.horizon) | (finish - self.area > self.spare)] = NEVER
        return _Block(1, finish, finish, None)

    def _never_on_all(self) -> set[int]:
        """The jobs that cannot hold all GPUs: too long there, or too much area."""
        wide = [_ticks(row, self.gpus) for row in self.options]
        return {
            job
            for job, ticks in enumerate(wide)
            if ticks > self.horizon or self.gpus * ticks - int(self.area[1 << job]) > self.spare
        }

    def _joined(self, one: _Block, other: _Block, needed: Collection[int] = ()) -> _Block:
        """Both blocks together, a partition of each set among them; no job holds both.

        Sets that lack a ``needed`` job may be left out.
        """
        width = one.width + other.width
        joined = np.full(len(self.area), NEVER)
        keys = _keys(one, other, range(len(self.options)), needed)
        both = sum(1 << place for place, job in enumerate(keys) if job in needed)
        groups, others = self._groups(one, keys), self._groups(other, keys)
        for key, (sets, ends) in enumerate(groups):
            spent = one.width * ends - self.area[sets]
            for partner in _disjoint(key, len(groups), both):
                if one is other and partner < key:
                    continue
                more, later = others[partner]
                if not len(sets) or not len(more):
                    continue
                start = np.searchsorted(later, ends - (self.spare - spent) // other.width)
                end = np.searchsorted(later, ends + (self.spare - spent) // one.width, side="right")
                if one is other and partner == key:
                    start = np.arange(len(sets))
                for rows, columns in _ranges(start, end):
                    if self.stop():
                        raise _TooMuch
                    apart = (sets[rows] & more[columns]) == 0
                    rows, columns = rows[apart], columns[apart]
                    union = sets[rows] | more[columns]
                    reached = np.maximum(ends[rows], later[columns])
                    cheap = width * reached - self.area[union] <= self.spare
                    np.minimum.at(joined, union[cheap], reached[cheap])
        return _Block(width, joined, joined, (one, other))

    def _groups(self, block: _Block, keys: Sequence[int]) -> list[tuple[Numbers, Numbers]]:
        """The sets that a block can do and when, ascending; a group for every set of key jobs among them."""
        sets = np.flatnonzero(block.finish < NEVER)
        sets = sets[np.argsort(block.finish[sets], kind="stable")]
        key = sum((((sets >> job) & 1) << place for place, job in enumerate(keys)), np.zeros_like(sets))
        order = np.argsort(key, kind="stable")
        cuts = np.searchsorted(key[order], np.arange((1 << len(keys)) + 1))
        groups = (sets[order[start:end]] for start, end in pairwise(cuts))
        return [(group, block.finish[group]) for group in groups]

    def _with_wide(self, block: _Block) -> _Block:
        """The block, with jobs that hold all of it."""
        finish = block.joined.copy()
        for job, row in enumerate(self.options):
            ticks = _ticks(row, block.width)
            if ticks <= self.horizon:
                halves = finish.reshape(-1, 2, 1 << job)
                np.minimum(halves[:, 1], halves[:, 0] + ticks, out=halves[:, 1])
        finish[block.width * finish - self.area > self.spare] = NEVER
        return _Block(block.width, finish, block.joined, block.parts)

    def _placed(self, block: _Block, jobs: int, first: int) -> list[Placed]:
        """How the block that starts at GPU ``first`` does a set of jobs by the time that ``finish`` says."""
        if block.parts is None:
            return self._held(jobs, 1, first)
        one, other = block.parts
        held = 0
        while block.finish[jobs] < block.joined[jobs]:
            job = next(
                job
                for job, row in enumerate(self.options)
                if jobs >> job & 1 and block.finish[jobs ^ 1 << job] + _ticks(row, block.width) == block.finish[jobs]
            )
            held, jobs = held | 1 << job, jobs ^ 1 << job
        sets = np.flatnonzero(one.finish <= block.joined[jobs])
        sets = sets[(sets & ~jobs) == 0]
        half = int(sets[np.maximum(one.finish[sets], other.finish[jobs ^ sets]).argmin()])
        return [
            *self._held(held, block.width, first),
            *self._placed(one, half, first),
            *self._placed(other, jobs ^ half, first + one.width),
        ]

    def _held(self, jobs: int, width: int, first: int) -> list[Placed]:
        """All of these jobs on one block."""
        return [
            Placed(job, min((o for o in row if o.width == width), key=lambda option: option.ticks), first)
            for job, row in enumerate(self.options)
            if jobs >> job & 1
        ]

    def _packing(self, placed: Sequence[Placed]) -> Packing:
        load = [0] * self.gpus
        for one in placed:
            hold(load, one.first, one.option)
        return Packing(tuple(placed), tuple(load))


def _ticks(row: Sequence[Option], width: int) -> int:
    return min((option.ticks for option in row if option.width == width), default=NEVER)


def _sums(numbers: Sequence[int]) -> Numbers:
    """For every set the sum of its members' numbers, at most NEVER."""
    sums = np.zeros(1, dtype=np.int64)
    for number in numbers:
        sums = np.concatenate([sums, np.minimum(sums + number, NEVER)])
    return sums


def _keys(one: _Block, other: _Block, jobs: Sequence[int], needed: Collection[int]) -> list[int]:
    """Jobs that tell groups of sets apart: needed ones first, then those that about half of the sets have."""
    sets = np.flatnonzero(one.finish < NEVER)
    most = min(len(sets), int((other.finish < NEVER).sum()))
    balance = [abs(2 * int((sets >> job & 1).sum()) - len(sets)) for job in jobs]
    count = min(len(jobs), most.bit_length() // 2)  # as many groups as sets in each
    return sorted(jobs, key=lambda job: (job not in needed, balance[job]))[:count]


def _disjoint(key: int, groups: int, needed: int) -> Iterator[int]:
    """All groups that share no key job with this one, and have those needed that it lacks."""
    lacked = needed & ~key
    rest = partner = groups - 1 - (key | lacked)
    while partner:
        yield partner | lacked
        partner = (partner - 1) & rest
    yield lacked


def _ranges(start: Numbers, end: Numbers) -> Iterator[tuple[Numbers, Numbers]]:
    """All pairs of a row and a number from its start up to its end, some at a time."""
    counts = np.maximum(end - start, 0)
    before = np.concatenate([[0], np.cumsum(counts)])
    row = 0
    while row < len(counts):
        until = max(row + 1, int(np.searchsorted(before, before[row] + PAIRS_AT_ONCE, side="right")) - 1)
        some = counts[row:until]
        rows = np.repeat(np.arange(row, until), some)
        if len(rows):
            yield rows, np.arange(len(rows)) + np.repeat(start[row:until] - before[row:until] + before[row], some)
        row = until
