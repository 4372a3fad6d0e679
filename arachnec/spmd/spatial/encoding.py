"""One encoder on several ranks, for one clip: its frames are cut along height and width, or its tiles are dealt out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from arachnec.spmd.spatial.operators import sharing
from arachnec.spmd.spatial.peers import Peers
from arachnec.spmd.spatial.split_tensor import NotDivisible, SplitTensor, split
from arachnec.spmd.spatial.tiles import Call, encode_tiles

FRAMES = 4  # dimensions that frames have at least: what is smaller has no height and width


def encode_together(encoder: nn.Module, loaded: Tensor, peers: Peers, ranks: int, calls: Sequence[Call]) -> Tensor:
    """``encoder(loaded)`` by so many ranks: tile by tile where ``calls_of`` finds tiles, else a part of each frame."""
    if calls:
        return encode_tiles(encoder, loaded, peers, ranks, calls)
    return encode_divided(encoder, loaded, peers, ranks)


@torch.no_grad()
def encode_divided(encoder: nn.Module, loaded: Tensor, peers: Peers, ranks: int) -> Tensor:
    """``encoder(loaded)`` by so many ranks, of which each runs its part of every frame; the whole result on each.

    Every rank gives the same ``loaded``. Collective. Raises NotDivisible for an encoder that cannot be shared.
    """
    grid = grid_of(loaded, ranks)
    rows, columns = loaded.dim() - 2, loaded.dim() - 1
    output = encoder(split(loaded, {rows: 0, columns: 1}, sharing(peers, grid)))
    if not isinstance(output, Tensor):
        raise NotDivisible(f"it gives no tensor but {type(output).__name__}")
    return output.gathered() if isinstance(output, SplitTensor) else output


def grid_of(loaded: Tensor, ranks: int) -> tuple[int, int]:
    """Rows and columns of ranks with the shortest borders. Raises NotDivisible where nothing can be cut."""
    if loaded.dim() < FRAMES:
        raise NotDivisible(f"what it reads has {loaded.dim()} dimensions, so no height and width")
    height, width = loaded.shape[-2:]
    grids = [(rows, ranks // rows) for rows in range(1, ranks + 1) if ranks % rows == 0]
    possible = [(rows, columns) for rows, columns in grids if rows <= height and columns <= width]
    if not possible:
        raise NotDivisible(f"its frames of {height} x {width} cannot be cut in {ranks}")
    return min(possible, key=lambda grid: (borders(height, width, *grid), grid))


def borders(height: int, width: int, rows: int, columns: int) -> float:
    """Pixels along the borders of the rank that has most neighbours."""
    return min(2, rows - 1) * width / columns + min(2, columns - 1) * height / rows
