"""The lines of a kernel's body, and where in a row the values stand that they name.

A row's lanes lie in tiles [P, Q], as many as waste few lanes: 5120 = 5 x 1024, 24 heads of 96 = 3 x 3 tiles of 8 x 32.
What differs from tile to tile is written once with ``@p`` and ``@q`` for the tile's number along each axis. What does
not change from row to row is written before the loop over rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from arachnec.codegen.triton.index import Index, Size, Space, lane_terms
from arachnec.codegen.triton.places import Place
from arachnec.codegen.triton.tiles import Tiling

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
