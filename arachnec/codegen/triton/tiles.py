"""How a row of lanes lies in tiles of powers of two, and with how many warps."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
