"""Chains one after another into the time that those before them leave free on aligned blocks of GPUs.

A chain takes the block on which it ends first, where each GPU tick of its work counts as ``price`` times its share of
all GPUs: with a low price it is wide, with a high one narrow, as where many wait. Time that is taken interrupts it at a
step. There it chooses its block anew, and while a better block is taken it goes on elsewhere, on any that is free.
So the order is one of priorities: a chain gives way to all before it, and to none behind it.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from arachnec.solver.malleable import Chain, Piece


@dataclass(frozen=True)
class Block:
    """GPUs ``first`` to ``first + width - 1``."""

    first: int
    width: int


@dataclass(frozen=True)
class Row:
    """A run at a width: its steps, ticks of each, degree, and the width of the block that it needs."""

    steps: int
    ticks: int
    degree: int
    width: int


@dataclass(frozen=True)
class Grid:
    """Blocks of nested ``widths``, ascending, each a divisor of the next."""

    gpus: int
    widths: tuple[int, ...]

    def blocks(self, width: int) -> list[Block]:
        return [Block(first, width) for first in range(0, self.gpus - width + 1, width)]

    def rows(self, chain: Chain) -> dict[int, tuple[Row, ...]]:
        """By width, of those on which all runs have a rate and the chain is faster than on a narrower one."""
        best, rows = math.inf, {}
        for width in self.widths:
            if width >= chain.narrowest and chain.ticks_at(width) < best:
                best, rates = chain.ticks_at(width), [run.at(width) for run in chain.runs]
                rows[width] = tuple(
                    Row(run.steps, rate.ticks, rate.degree, next(w for w in self.widths if w >= rate.degree))
                    for run, rate in zip(chain.runs, rates, strict=True)
                )
        return rows


class Taken:
    """When each block of a grid has a GPU that is taken: disjoint stretches of time, by their starts and ends."""

    def __init__(self, grid: Grid, pieces: Iterable[Piece] = ()) -> None:
        self.visits = 0  # stretches that were looked at, to count work
        gpus: list[list[tuple[int, int]]] = [[] for _ in range(grid.gpus)]
        for piece in pieces:
            for gpu in range(piece.first, piece.first + piece.degree):
                gpus[gpu].append((piece.start, piece.end))
        self.starts: dict[Block, list[int]] = {}
        self.ends: dict[Block, list[int]] = {}
        narrower: list[Block] = []
        for width in grid.widths:
            blocks = grid.blocks(width)
            for block in blocks:
                inside = [part for part in narrower if block.first <= part.first < block.first + width]
                within = [list(zip(self.starts[part], self.ends[part], strict=True)) for part in inside]
                self._unite(block, [span for spans in within or [gpus[block.first]] for span in spans])
            narrower = blocks
        self._blocks: list[list[Block]] = [[] for _ in range(grid.gpus)]
        for block in self.starts:
            for gpu in range(block.first, block.first + block.width):
                self._blocks[gpu].append(block)

    def _unite(self, block: Block, spans: list[tuple[int, int]]) -> None:
        starts: list[int] = []
        ends: list[int] = []
        for start, end in sorted(spans):
            if ends and start <= ends[-1]:
                ends[-1] = max(ends[-1], end)
            else:
                starts.append(start)
                ends.append(end)
        self.starts[block], self.ends[block] = starts, ends

    def take(self, piece: Piece) -> None:
        blocks = {block for gpu in range(piece.first, piece.first + piece.degree) for block in self._blocks[gpu]}
        for block in blocks:
            starts, ends = self.starts[block], self.ends[block]
            low, high = bisect_left(ends, piece.start), bisect_right(starts, piece.end)
            start = min(piece.start, starts[low]) if low < high else piece.start
            end = max(piece.end, ends[high - 1]) if low < high else piece.end
            starts[low:high], ends[low:high] = [start], [end]

    def filled(
        self, rows: Sequence[Row], block: Block, run: int, begin: int, now: int, limit: float, until: float = math.inf
    ) -> tuple[list[Span], int] | None:
        """Steps from ``begin`` of ``run`` on, as early as the block has time, and when they end.

        None where that is not before ``limit``. What would end behind ``until`` is left out.
        """
        spans: list[Span] = []
        left = sum(row.steps * row.ticks for row in rows[run:]) - begin * rows[run].ticks
        for index in range(run, len(rows)):
            row = rows[index]
            part = block if row.width == block.width else Block(block.first, row.width)
            starts, ends = self.starts[part], self.ends[part]
            at, number = bisect_right(ends, now), len(starts)
            while begin < row.steps:
                self.visits += 1
                if now + left >= limit:
                    return None
                moment = starts[at] if at < number else math.inf
                if moment > until:
                    moment = until
                steps = row.steps - begin
                if now + steps * row.ticks > moment:
                    steps = max(0, int(moment - now) // row.ticks)
                if steps:
                    end = now + steps * row.ticks
                    spans.append((index, begin, steps, now, end))
                    begin, now, left = begin + steps, end, left - steps * row.ticks
                if begin < row.steps:
                    if moment == until:
                        return spans, now
                    now = max(now, ends[at])
                    at += 1
            begin = 0
        return spans, now


Span = tuple[int, int, int, int, int]  # run, begin, steps, start, end


def inserted(number: int, chain: Chain, grid: Grid, taken: Taken, price: float) -> list[Piece]:
    """The pieces of a chain, which are taken then too."""
    rows = grid.rows(chain)
    run, begin, now = 0, 0, chain.release
    pieces: list[Piece] = []
    block: Block | None = None
    while run < len(chain.runs):
        block, spans = _best(rows, grid, taken, block, run, begin, now, price)
        if spans[0][3] > now:
            meanwhile = _meanwhile(rows, grid, taken, run, begin, now, spans[0][3])
            if meanwhile is not None:
                block, spans = meanwhile
        for before, span in pairwise([(0, 0, 0, 0, spans[0][3]), *spans]):
            if span[3] > before[4]:
                break
            index, first, steps, start, end = span
            row = rows[block.width][index]
            piece = Piece(number, index, first, steps, row.degree, block.first, start, end)
            taken.take(piece)
            pieces.append(piece)
            run, begin, now = (index, first + steps, end) if first + steps < row.steps else (index + 1, 0, end)
    return joined(pieces)


def _best(
    rows: dict[int, tuple[Row, ...]],
    grid: Grid,
    taken: Taken,
    here: Block | None,
    run: int,
    begin: int,
    now: int,
    price: float,
) -> tuple[Block, list[Span]]:
    """The block of least end and priced work, that on which the chain is before others."""
    least = math.inf
    best: tuple[Block, list[Span]] | None = None
    options = []
    for width, own in rows.items():
        left = sum(row.steps * row.ticks for row in own[run:]) - begin * own[run].ticks
        area = sum(row.steps * row.ticks * row.width for row in own[run:]) - begin * own[run].ticks * own[run].width
        options.append((left + price * area / grid.gpus, width, left, price * area / grid.gpus))
    for cost, width, left, extra in sorted(options):
        if now + cost >= least:
            break
        blocks = grid.blocks(width)
        if here is not None and here.width == width:
            blocks.sort(key=lambda block: block != here)
        for block in blocks:
            way = taken.filled(rows[width], block, run, begin, now, least - extra)
            if way is not None:
                best, least = (block, way[0]), way[1] + extra
                if way[1] == now + left:
                    break
    assert best is not None, "an empty block ends some time"
    return best


def _meanwhile(
    rows: dict[int, tuple[Row, ...]], grid: Grid, taken: Taken, run: int, begin: int, now: int, until: int
) -> tuple[Block, list[Span]] | None:
    """The block on which most steps end by then, the narrowest of these; None where none does."""
    best, most = None, (0, 0)
    for width, own in rows.items():
        for block in grid.blocks(width):
            way = taken.filled(own, block, run, begin, now, math.inf, until)
            if way is not None and way[0]:
                last = way[0][-1]
                done = (last[0], last[1] + last[2])
                if done > max(most, (run, begin)):
                    best, most = (block, way[0]), done
    return best


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces of a chain in order, those that go on where the one before ended as one."""
    whole: list[Piece] = []
    for piece in pieces:
        last = whole[-1] if whole else None
        if last is not None and (last.run, last.degree, last.first, last.end) == (
            piece.run, piece.degree, piece.first, piece.start
        ):  # fmt: skip
            whole[-1] = replace(last, steps=last.steps + piece.steps, end=piece.end)
        else:
            whole.append(piece)
    return whole
