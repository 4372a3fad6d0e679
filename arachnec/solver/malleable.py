"""Chains of runs of equal steps: between two steps a run may change its degree and move to other GPUs.

A step's work is not divided, so a schedule is a list of pieces, each some steps of a run on a block of GPUs. Moving
costs nothing here. Two results carry this file:

* With fractions of steps the least area of a chain within a time is a linear program with one constraint, whose answer
  is the lower convex hull of (ticks, area), run by run. Summed over chains, T is possible only if that is at most
  GPUs x T. The least such T is a bound for every schedule of whole steps.
* Wrap-around (McNaughton, Management Science 1959): jobs that may be interrupted fill one machine after another up to
  T; the one that reaches beyond ends there and begins on the next machine, where nothing overlaps, because none is
  longer than T. Here the machines are aligned blocks of GPUs, the widest first, and the cut is at a step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, product
from typing import TypeAlias

from arachnec.solver.bound import horizons
from arachnec.solver.problem import least_possible

HALVINGS = 6  # of the interval between a horizon that is too short and one that is not
PARTS = (1.0, 1 / 2, 1 / 4, 1 / 8)  # of a horizon, that no chain takes longer than, if it can
WORTH = (1.0, 0.9, 0.0)  # of a chain's work with one width, above which it is not given two


@dataclass(frozen=True)
class Rate:
    """One way to take a step: on ``degree`` GPUs in ``ticks``."""

    degree: int
    ticks: int

    @property
    def area(self) -> int:
        return self.degree * self.ticks


@dataclass(frozen=True)
class Run:
    """``steps`` equal steps one after another; ``rates`` ascend in degree and never in ticks."""

    steps: int
    rates: tuple[Rate, ...]

    def at(self, width: int) -> Rate:
        """The fastest rate on at most so many GPUs; the narrowest where all are wider."""
        return self.rates[max(1, bisect_right(self._degrees, width)) - 1]

    @cached_property
    def _degrees(self) -> tuple[int, ...]:
        return tuple(rate.degree for rate in self.rates)

    @cached_property
    def hull(self) -> tuple[Rate, ...]:
        """Rates on the lower convex hull of ticks and area, from the least area to the fewest ticks."""
        best: list[Rate] = []
        for rate in sorted(self.rates, key=lambda rate: (-rate.ticks, rate.area)):
            if best and best[-1].ticks == rate.ticks:
                continue
            while best and best[-1].area >= rate.area:
                best.pop()
            while len(best) > 1 and _steepness(best[-2], best[-1]) >= _steepness(best[-2], rate):
                best.pop()
            best.append(rate)
        return tuple(best)


def _steepness(slow: Rate, fast: Rate) -> float:
    """Area for each tick saved."""
    return (fast.area - slow.area) / (slow.ticks - fast.ticks)


@dataclass(frozen=True)
class Chain:
    """Runs one after another, none before ``release`` ticks."""

    runs: tuple[Run, ...]
    release: int = 0

    def __hash__(self) -> int:
        return self._hash  # of hundreds of rates, and chains are looked up by kind

    @cached_property
    def _hash(self) -> int:
        return hash((self.runs, self.release))

    @cached_property
    def shortest(self) -> int:
        """Ticks from its release at the fastest rates."""
        return sum(run.steps * run.rates[-1].ticks for run in self.runs)

    @cached_property
    def narrowest(self) -> int:
        """GPUs without which some run has no rate."""
        return max((run.rates[0].degree for run in self.runs), default=1)

    @cached_property
    def frontier(self) -> tuple[tuple[float, float], ...]:
        """Corners of its least area by ticks: ticks descend, areas ascend; between them it is linear."""
        ticks = float(sum(run.steps * run.hull[0].ticks for run in self.runs))
        area = float(sum(run.steps * run.hull[0].area for run in self.runs))
        corners = [(ticks, area)]
        edges = sorted(
            (_steepness(slow, fast), run.steps * (slow.ticks - fast.ticks), run.steps * (fast.area - slow.area))
            for run in self.runs
            for slow, fast in pairwise(run.hull)
        )
        for _, saved, more in edges:
            ticks, area = ticks - saved, area + more
            corners.append((ticks, area))
        return tuple(corners)

    def least_area(self, ticks: float) -> float:
        """GPU ticks that it needs at least to end within so many; infinite where it cannot."""
        corners = self.frontier
        if ticks >= corners[0][0]:
            return corners[0][1]
        for (slow, less), (fast, more) in pairwise(corners):
            if ticks >= fast:
                return less + (more - less) * (slow - ticks) / (slow - fast)
        return float("inf")

    def ticks_at(self, width: int) -> int:
        """Ticks of all of it on one block of GPUs."""
        if width not in self._ticks:
            self._ticks[width] = sum(run.steps * run.at(width).ticks for run in self.runs)
        return self._ticks[width]

    @cached_property
    def _ticks(self) -> dict[int, int]:
        return {}


Batches: TypeAlias = Mapping[Chain, Sequence[tuple[int, Chain]]]  # of a chain, how many of it together are what


def least_makespan(chains: Sequence[Chain], gpus: int, batches: Batches | None = None) -> int:
    """Ticks below which no schedule ends, whichever of the ``batches`` it takes; 0 without chains."""
    kinds = Counter(chains)
    ways = {chain: ((1, chain), *(batches or {}).get(chain, ())) for chain in kinds}
    low = max((chain.release + min(way.shortest for _, way in ways[chain]) for chain in kinds), default=0)

    def possible(horizon: int) -> bool:
        first, area = min(chain.release for chain in kinds), 0.0
        for chain, count in kinds.items():
            area += count * min(way.least_area(horizon - chain.release) / size for size, way in ways[chain])
        return area <= gpus * (horizon - first) * (1 + 1e-12)

    return least_possible(possible, low) if kinds else low


@dataclass(frozen=True)
class Piece:
    """``steps`` steps of a run of a chain, the first of them number ``begin``, on GPUs from ``first`` on."""

    chain: int
    run: int
    begin: int
    steps: int
    degree: int
    first: int
    start: int
    end: int


def wrapped(chains: Sequence[Chain], gpus: int, widths: Sequence[int], bound: int) -> list[Piece] | None:
    """The shortest wrap-around schedule over rising horizons from the bound on; None where none is found.

    Widths are of ``widths``, ascending, each a divisor of the next. No chain may have a release.
    """
    below = bound
    for horizon in map(int, horizons(bound)):
        pieces = wrapped_within(chains, gpus, widths, horizon)
        if pieces is None:
            below = horizon
            continue
        for _ in range(HALVINGS):
            middle = (below + length(pieces)) // 2
            shorter = wrapped_within(chains, gpus, widths, middle)
            below, pieces = (middle, pieces) if shorter is None else (below, shorter)
        return pieces
    return None


def wrapped_within(chains: Sequence[Chain], gpus: int, widths: Sequence[int], horizon: int) -> list[Piece] | None:
    """A wrap-around schedule that ends by the horizon; None where the widths and blocks do not allow it.

    Chains have the width of their least area. Where that leaves gaps that are wide and short, they are wider, so that
    none takes more than a part of the horizon, if it can.
    """
    for part, worth in product(PARTS, WORTH):
        ways = {chain: _way(chain, widths, horizon, part, worth) for chain in set(chains)}
        known = [way for way in map(ways.get, chains) if way is not None]
        if len(known) < len(chains) or sum(way.area for way in known) > gpus * horizon:
            continue
        for tightest in (True, False):
            pieces = _in_blocks(chains, known, gpus, horizon, tightest)
            if pieces is not None:
                return pieces
    return None


@dataclass(frozen=True)
class _Way:
    """The first ``cut`` steps of a chain on ``width`` GPUs, and the others, if any, on the first ``narrow`` of them."""

    area: int
    width: int
    cut: int | None = None
    narrow: int = 0


def _way(chain: Chain, widths: Sequence[int], horizon: int, part: float, worth: float) -> _Way | None:
    """The way of least area that ends within a part of the horizon; where none does, within all of it."""
    wide = [width for width in widths if width >= chain.narrowest]
    able = [(chain.ticks_at(width) * width, width) for width in wide if chain.ticks_at(width) <= horizon]
    if not able:
        return None
    short = [(area, width) for area, width in able if area <= horizon * part * width]
    if short:
        return _Way(*min(short))
    ways = [_Way(*min(able))]
    least = wide.index(min(width for _, width in able))
    if least > 0:
        mixed = _two_widths(chain, wide[least], wide[least - 1], horizon)
        ways += [mixed] if mixed.area <= worth * ways[0].area else []
    return ways[-1]


def _two_widths(chain: Chain, wide: int, narrow: int, horizon: int) -> _Way:
    """As few steps as possible on the wide block."""
    late = chain.ticks_at(narrow) - horizon
    cut = area = 0
    for run in chain.runs:
        slow, fast = run.at(narrow).ticks, run.at(wide).ticks
        steps = min(run.steps, -(-late // (slow - fast))) if late > 0 and slow > fast else 0
        steps = run.steps if late > 0 and steps == 0 else steps
        late -= steps * (slow - fast)
        cut += steps
        area += steps * fast * wide + (run.steps - steps) * slow * narrow
    return _Way(area, wide, cut, narrow)


def _in_blocks(
    chains: Sequence[Chain], ways: Sequence[_Way], gpus: int, horizon: int, tightest: bool
) -> list[Piece] | None:
    """The widest first; of one width first those that go on with fewer GPUs, then the longest."""
    free = [_Free(0, gpus, 0, horizon)]
    pieces: list[Piece] = []
    for width in sorted({way.width for way in ways}, reverse=True):
        free = [part for space in free for part in space.parts(width)]
        here = [number for number, way in enumerate(ways) if way.width == width]
        for number in sorted(here, key=lambda n: (ways[n].cut is None, -chains[n].ticks_at(width))):
            way = ways[number]
            placed = (
                _place(number, chains[number], width, free, tightest)
                if way.cut is None
                else _shrunk(number, chains[number], way, free)
            )
            if placed is None:
                return None
            pieces += placed
    return pieces


def _shrunk(number: int, chain: Chain, way: _Way, free: list[_Free]) -> list[Piece] | None:
    """The chain in an empty block, of which all but the first GPUs are free again behind its wide steps."""
    space = next((space for space in free if space.width == way.width and space.start == 0), None)
    if space is None:
        return None
    pieces = _take(number, chain, way.width, space, 0, way.cut)
    free.remove(space)
    kept, *others = space.parts(way.narrow)
    free += [kept, *others]
    return pieces + _take(number, chain, way.narrow, kept, way.cut or 0, None)


@dataclass
class _Free:
    """GPUs ``first`` to ``first + width - 1`` from ``start`` to ``end``."""

    first: int
    width: int
    start: int
    end: int

    def parts(self, width: int) -> Iterator[_Free]:
        """As blocks of a smaller width; what is left over keeps its own."""
        if self.width < width:
            yield self
            return
        for first in range(self.first, self.first + self.width - width + 1, width):
            yield _Free(first, width, self.start, self.end)
        rest = self.width % width
        if rest:
            yield _Free(self.first + self.width - rest, rest, self.start, self.end)


def _place(number: int, chain: Chain, width: int, free: list[_Free], tightest: bool) -> list[Piece] | None:
    """A chain in a begun block that holds it, or its end at the end of one and its beginning in another, or in an empty
    one. The ``tightest`` begun blocks first, or the roomiest."""
    blocks = [space for space in free if space.width == width and space.start < space.end]
    needed = chain.ticks_at(width)
    started = [space for space in blocks if space.start > 0]
    for tail in sorted(started, key=lambda space: (space.end - space.start, space.first), reverse=not tightest):
        if tail.end - tail.start >= needed:
            return _take(number, chain, width, tail, 0, None)
        cut, ticks = _last_steps(chain, width, tail.end - tail.start)
        if not ticks:
            continue
        begin = tail.end - ticks
        heads = [s for s in blocks if s is not tail and s.start + needed - ticks <= min(begin, s.end)]
        if heads:
            head = max(heads, key=lambda s: (s.start, -s.first))
            pieces = _take(number, chain, width, head, 0, cut)
            tail.start = begin
            return pieces + _take(number, chain, width, tail, cut, None)
    whole = [space for space in blocks if space.end - space.start >= needed]
    if whole:
        return _take(number, chain, width, max(whole, key=lambda s: (s.start, -s.first)), 0, None)
    return None


def _last_steps(chain: Chain, width: int, room: int) -> tuple[int, int]:
    """From which step of the chain on, counted over all runs, the rest fits; and its ticks."""
    at, ticks = sum(run.steps for run in chain.runs), 0
    for run in reversed(chain.runs):
        step_ticks = run.at(width).ticks
        fitting = min(run.steps, (room - ticks) // step_ticks)
        at, ticks = at - fitting, ticks + fitting * step_ticks
        if fitting < run.steps:
            break
    return at, ticks


def _take(number: int, chain: Chain, width: int, space: _Free, begin: int, end: int | None) -> list[Piece]:
    """The chain's steps from ``begin`` to before ``end`` at the start of a free space, which shrinks."""
    pieces: list[Piece] = []
    before = 0
    for index, run in enumerate(chain.runs):
        first, last = max(begin, before), before + run.steps if end is None else min(end, before + run.steps)
        if first < last:
            rate = run.at(width)
            until = space.start + (last - first) * rate.ticks
            pieces.append(
                Piece(number, index, first - before, last - first, rate.degree, space.first, space.start, until)
            )
            space.start = until
        before += run.steps
    return pieces


def length(pieces: Sequence[Piece]) -> int:
    """Ticks at which the last piece ends."""
    return max((piece.end for piece in pieces), default=0)
