"""A clip's tokens in an order in which neighbours in time, height and width stand side by side.

The grid is cut into cubes: *groups* of queries, *blocks* of keys and *cells*, whose tokens are scored as one. The
smaller cubes lie within the larger ones, so that in the one order all of them are runs of tokens.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from arachnec.kernels.attention.host_tables import on_device
from arachnec.kernels.sparse.cube_sides import CELL as CELL
from arachnec.kernels.sparse.cube_sides import Grid as Grid
from arachnec.kernels.sparse.cube_sides import GridCut, Starts, cut, cut_grid

QUERIES, KEYS = 256, 64  # tokens of a cube on a CPU; measured by benchmarks/sparse/cpu_speed.py


@dataclass(frozen=True, eq=False)
class TokenCubes:
    """Starts are places in the order, one more than there are cubes: the last is where the last cube ends.

    Groups and cells are of video tokens. Blocks go on over the captions, which stand behind the video.
    """

    order: Tensor  # [S] int64, the token of the sequence that stands at each place
    groups: Tensor  # [G + 1] int32
    blocks: Tensor  # [N + 1] int32
    cells: Tensor  # [C + 1] int32
    captions: int  # blocks of captions, the last of the blocks

    @property
    def video(self) -> int:
        """Video tokens."""
        return int(self.groups[-1])

    @property
    def places(self) -> Tensor:
        """[S] int64, where each token of the sequence stands: the inverse of the order."""
        return torch.empty_like(self.order).scatter_(0, self.order, torch.arange(len(self.order)))

    @property
    def group_cells(self) -> Tensor:
        """[G + 1] int32: where the groups start, in cells."""
        return torch.searchsorted(self.cells, self.groups).int()

    @property
    def block_cells(self) -> Tensor:
        """[N - captions + 1] int32: where the blocks of video start, in cells."""
        return torch.searchsorted(self.cells, self.blocks[: len(self.blocks) - self.captions]).int()


@functools.lru_cache(maxsize=64)
def token_cubes(
    grid: Grid,
    *,
    captions: int = 0,
    captions_first: bool = False,
    queries: int = QUERIES,
    keys: int = KEYS,
    cell: int = CELL,
) -> TokenCubes:
    """The order of a sequence of a clip's tokens (raster order) with ``captions`` tokens behind or in front of them.

    The same sizes give the same object, so that what is worked out of it need not be again. ``queries``, ``keys``,
    ``cell``: tokens of the largest cube of each kind. Raises ValueError for a grid without
    tokens and for cells larger than groups or blocks.
    """
    if min(grid) < 1 or captions < 0:
        raise ValueError(f"a grid of {' x '.join(map(str, grid))} tokens and {captions} of captions has no order")
    if not 1 <= cell <= min(queries, keys):
        raise ValueError(f"cells of {cell} tokens do not lie within groups of {queries} and blocks of {keys}")
    cut_up = cut_grid(grid, queries, keys, cell)
    return arranged(grid, cut_up, queries >= keys, keys, captions=captions, captions_first=captions_first)


def arranged(
    grid: Grid, cubes: GridCut, groups_are_large: bool, keys: int, *, captions: int = 0, captions_first: bool = False
) -> TokenCubes:
    """The order for a grid that is cut somehow; captions are in blocks of ``keys``."""
    key = torch.zeros(math.prod(grid), dtype=torch.int64)
    starts = []
    for axes in (cubes.large, cubes.small, cubes.cells, tuple(tuple(range(length + 1)) for length in grid)):
        for axis, of_axis in enumerate(axes):
            shape = [1, 1, 1]
            shape[axis] = -1
            key = key * grid[axis] + _numbers(of_axis).view(shape).expand(grid).reshape(-1)
        _, key, counts = torch.unique(key, return_inverse=True, return_counts=True)
        starts.append(_starts(counts))
    groups, blocks = starts[:2] if groups_are_large else (starts[1], starts[0])
    video = key.argsort()
    caption = torch.arange(captions) + (0 if captions_first else len(video))
    extra = torch.tensor([end - first for first, end in cut(0, captions, keys)], dtype=torch.int64)
    blocks = torch.cat([blocks, blocks[-1] + _starts(extra)[1:]])
    order = torch.cat([video + (captions if captions_first else 0), caption])
    return TokenCubes(order, groups.int(), blocks.int(), starts[2].int(), len(extra))


@functools.lru_cache(maxsize=64)
def order_on(cubes: TokenCubes, device: torch.device) -> Tensor:
    """The order, on a device; copied there once."""
    return on_device(cubes.order, device)


def _numbers(starts: Starts) -> Tensor:
    """For each place on an axis the number of its part."""
    return torch.repeat_interleave(torch.arange(len(starts) - 1), torch.tensor(starts).diff())


def _starts(counts: Tensor) -> Tensor:
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])
