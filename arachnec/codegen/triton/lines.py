"""The lines of a kernel's body, how a row of lanes lies in tiles, and where in it the values stand.

A row's lanes lie in tiles [P, Q], as many as waste few lanes: 5120 = 5 x 1024, 24 heads of 96 = 3 x 3 tiles of 8 x 32.
What differs from tile to tile is written once with ``@p`` and ``@q`` for the tile's number along each axis. What does
not change from row to row is written before the loop over rows.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from arachnec.codegen.triton.index import Index, Size, Space, lane_terms
from arachnec.codegen.triton.places import Place

WHOLE = 8192  # lanes of a row that a program holds at once
BLOCK = 2048  # lanes of a wider row that it takes at a time
TILE = 2048
TILES = 16
LANES = 65536  # fp32 registers of a multiprocessor


@dataclass(frozen=True)
class Tiling:
    """``outer_tiles`` x ``inner_tiles`` tiles [P, Q] = [p, q] of a row [outer, inner]; 0 lanes: only a run knows.

    ``loops``: a program goes over a row in blocks of q lanes; ``spread``: each block is a program's.
    """

    outer: int
    inner: int
    p: int
    q: int
    outer_tiles: int = 1
    inner_tiles: int = 1
    loops: bool = False
    spread: bool = False

    def count(self, axis: str) -> int:
        return self.outer_tiles if axis == "@p" else self.inner_tiles

    def names(self, axis: str) -> list[str]:
        """What stands for ``axis`` in the name of what is in a tile."""
        return [f"_{k}" for k in range(self.count(axis))] if self.count(axis) > 1 else [""]

    def fits(self, axis: str) -> bool:
        """Whether no lane of a tile is past the row."""
        if axis == "@p":
            return self.outer_tiles * self.p == self.outer
        return not self.loops and (self.inner % self.q == 0 if self.spread else self.inner_tiles * self.q == self.inner)

    @property
    def lanes(self) -> int:
        """Of all tiles that a program holds."""
        return self.outer_tiles * self.inner_tiles * self.p * self.q

    @property
    def warps(self) -> int:
        """Four lanes of a tile for each thread, and at most 20 registers for each value."""
        tile = self.p * self.q
        return min(16, max(1, tile // 32), max(1, tile // 128, power(math.ceil(self.lanes / 640))))

    def holds(self, rows: int) -> bool:
        """Whether so many rows fit the registers."""
        return rows * self.lanes <= LANES

    def held(self, sums: int) -> int:
        """Rows' worth of values that may be kept over a run, beside ``sums`` and what a row needs."""
        return max(0, LANES // self.lanes - 6 - 2 * sums)


def power(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def tiles_of(outer: int, inner: int) -> Tiling:
    """The tiles with the fewest idle lanes, of these the fewest: more than eight only where that saves a quarter."""
    least = min(128, power(outer) * power(inner))
    choices = []
    for p in (1 << k for k in range(power(outer).bit_length())):
        for q in (1 << k for k in range(power(inner).bit_length())):
            count = math.ceil(outer / p), math.ceil(inner / q)
            if least <= p * q <= TILE and math.prod(count) <= TILES:
                choices.append(Tiling(outer, inner, p, q, *count))

    def cost(tiling: Tiling) -> tuple[float, int, int]:
        count = tiling.outer_tiles * tiling.inner_tiles
        return tiling.lanes * (1.25 if count > 8 else 1), count, -tiling.q

    return min(choices, key=cost)


def spread(inner: int) -> Tiling:
    """Blocks of a row that programs of their own take: the widest with the fewest idle lanes."""
    widths = (BLOCK, BLOCK // 2, BLOCK // 4)
    return Tiling(1, inner, 1, min(widths, key=lambda width: -(-inner // width) * width), spread=True)


ONCE, ROW = 0, 1  # where a line stands: before the loop over rows, or in it; deeper ones in a loop over blocks of a row


@dataclass
class Lines:
    """Lines by the loop that they stand in, and the ``numbers`` made of sizes that they need.

    ``still`` are the row coordinates that do not change within a run of rows; ``hoisted`` is how many tiles' worth of
    values may be held over a run.
    """

    space: Space
    tiling: Tiling
    precision: str
    still: frozenset[int]
    hoisted: int
    lines: list[list[str]] = field(default_factory=lambda: [[], []])
    numbers: dict[Size, str] = field(default_factory=dict)
    depths: dict[str, int] = field(default_factory=dict)
    count: int = 0

    def new(self, text: str, place: Place, axes: str | None = None) -> str:
        """A line that gives ``text`` a name, which says along which axes it has a value for each tile."""
        name = f"v{self.count}"
        self.count += 1
        self.depths[name] = depth = max(self._depth(place), self.depth_of(text))
        name += self.axes(place) if axes is None else axes
        self.lines[depth].append(f"{name} = {text}")
        return name

    def axes(self, place: Place) -> str:
        used = frozenset().union(*(at.used for at in place)) if place else frozenset()
        outer = any(self.space.leads <= k < self.space.first_inner for k in used)
        inner = any(k >= self.space.first_inner for k in used) or self.space.lane in used
        return "@p" * outer + "@q" * inner

    def rows(self, place: Place) -> set[int]:
        """The coordinates of rows that a place depends on."""
        return {k for at in place for k in at.used if k < self.space.leads and k != self.space.lane}

    def _depth(self, place: Place) -> int:
        if self.tiling.loops:
            return len(self.lines) - 1 if "@q" in self.axes(place) else ROW
        return ONCE if self.rows(place) <= self.still and (self.hoisted > 0 or not self.axes(place)) else ROW

    def depth_of(self, text: str) -> int:
        """The depth of the deepest value that ``text`` names."""
        return max((self.depths[name] for name in re.findall(r"\bv\d+", text)), default=ONCE)

    def number(self, size: Size) -> str:
        """A number made of sizes: written out, or an argument."""
        if isinstance(size, int):
            return str(size)
        return self.numbers.setdefault(size, f"n{len(self.numbers)}")

    @property
    def width(self) -> str:
        """Lanes along the second axis."""
        space = self.space
        return self.number(space.inner_size if space.lane is None else space.sizes[space.lane])

    def text_of(self, index: Index) -> str:
        space = self.space
        terms = [] if index.offset == 0 else [self.number(index.offset)]
        for k in range(space.leads):
            if index.factors[k] != 0:
                name = "q@q" if k == space.lane else f"i{k}"
                terms.append(name if index.factors[k] == 1 else f"{self.number(index.factors[k])} * {name}")
        factors = list(index.factors)
        for axis, (start, stop) in (("p@p", (space.leads, space.first_inner)), ("q@q", (space.first_inner, None))):
            terms += lane_terms(axis, list(space.sizes[start:stop]), factors[start:stop])
        return " + ".join(terms) or "0"

    def inside(self, axes: str) -> str:
        """The lanes of a row that are in it; nothing where all of a tile are."""
        return " & ".join(f"in_{a[1]}{a}" for a in ("@p", "@q") if a in axes and not self.tiling.fits(a))

    def address(self, name: str, place: Place) -> str:
        terms = [f"({self.text_of(at)}) * {name}_{dim}" for dim, at in enumerate(place) if at.used or at.offset != 0]
        return " + ".join([name, *terms])

    def block(self, write: Callable[[], object]) -> None:
        """What ``write`` writes, for each block of a row."""
        self.lines.append([])
        write()
        inner = self.lines.pop()
        self.lines[ROW] += [f"for begin in tl.range(0, {self.width}, Q):", "    q = begin + tl.arange(0, Q)[None, :]",
                            f"    in_q = q < {self.width}", *(f"    {line}" for line in inner)]  # fmt: skip


def zeros(axes: str, precision: str = "tl.int32") -> str:
    return f"tl.zeros([{'P' if '@p' in axes else '1'}, {'Q' if '@q' in axes else '1'}], {precision})"
