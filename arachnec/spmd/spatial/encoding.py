"""One encoder on several ranks, for one clip: its frames are cut along height and width, or its tiles are dealt out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from arachnec.models.encoders import tiles_called, tiling_vae
from arachnec.spmd.spatial.operators import sharing
from arachnec.spmd.spatial.peers import Peers
from arachnec.spmd.spatial.split_tensor import NotDivisible, SplitTensor, split


@dataclass(frozen=True)
class Call:
    """One call of a VAE's ``encoder``: of which tile, how many pixels it reads, the shape of what it gives."""

    tile: int
    pixels: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    given: pytree.TreeSpec  # the first of its leaves is the tensor of this shape, the others are caches


@torch.no_grad()
def calls_of(encoder: nn.Module, loaded: Tensor) -> tuple[Call, ...]:
    """The calls for a clip, of an encoder and a clip on the meta device; none where it has one tile."""
    vae = tiling_vae(encoder)
    if vae is None:
        return ()
    calls: list[Call] = []
    known: dict[tuple[int, ...], Any] = {}  # what a tile's first call gives, where it keeps nothing
    at_first = _kept(vae)

    def record(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        begins = len(tensors) == 1 and _kept(vae) == at_first
        tile = (calls[-1].tile if calls else -1) + begins
        plain = begins and not any(isinstance(value, list) for value in (*args, *kwargs.values()))
        output = known.get(tuple(tensors[0].shape)) if plain else None
        if output is None:
            output = run(*args, **kwargs)
        if plain and _kept(vae) == at_first:
            known[tuple(tensors[0].shape)] = output
        (first, *_), given = pytree.tree_flatten(output)
        calls.append(Call(tile, tensors[0].numel(), tuple(first.shape), first.dtype, given))
        return output

    with tiles_called(vae, record):
        encoder(loaded)
    return tuple(calls) if calls and calls[-1].tile > 0 else ()


def _kept(vae: nn.Module) -> set[tuple[str, str, int]]:
    """The tensors that modules keep as attributes: some VAEs' caches lie there, until a tile has ended."""
    return {
        (path, name, id(value))
        for path, module in vae.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }


@torch.no_grad()
def encode_tiles(encoder: nn.Module, loaded: Tensor, peers: Peers, ranks: int, calls: Sequence[Call]) -> Tensor:
    """``encoder(loaded)`` by so many ranks; the whole result on each. Collective: all have the same ``calls``."""
    vae = tiling_vae(encoder)
    assert vae is not None
    owners = owners_of(calls, ranks)
    own: list[Tensor] = []
    numbers = iter(range(len(calls)))

    def run_own(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        number = next(numbers)
        if owners[number] == peers.index:
            output = run(*args, **kwargs)
            own.append(pytree.tree_leaves(output)[0].clone())  # some VAEs blend in it, here with zeros
            return output
        call = calls[number]
        return _given(call, torch.zeros(call.shape, dtype=call.dtype, device=loaded.device))

    with tiles_called(vae, run_own):
        encoder(loaded)
    outputs = iter(_everyones(own, peers, ranks, calls, owners, loaded.device))
    with tiles_called(vae, lambda *_, **__: next(outputs)):
        whole: Tensor = encoder(loaded)
    return whole


def owners_of(calls: Sequence[Call], ranks: int) -> list[int]:
    """For every call the rank that runs it. Tiles are dealt out whole, the largest first, to who has least."""
    pixels: dict[int, int] = defaultdict(int)
    for call in calls:
        pixels[call.tile] += call.pixels
    load, owner = [0] * ranks, {}
    for tile in sorted(pixels, key=lambda tile: (-pixels[tile], tile)):
        owner[tile] = load.index(min(load))
        load[owner[tile]] += pixels[tile]
    return [owner[call.tile] for call in calls]


def _everyones(
    own: Sequence[Tensor], peers: Peers, ranks: int, calls: Sequence[Call], owners: Sequence[int], device: torch.device
) -> Iterator[Any]:
    """What every call gives, in their order. Collective."""
    dtype = calls[0].dtype
    sizes = [math.prod(call.shape) for call in calls]
    mine = torch.cat([torch.empty(0, dtype=dtype, device=device), *(tensor.reshape(-1) for tensor in own)])
    counts = [sum(size for size, owner in zip(sizes, owners, strict=True) if owner == rank) for rank in range(ranks)]
    received = peers.exchange(
        [mine.new_empty(0) if rank == peers.index else mine for rank in range(ranks)],
        [(0,) if rank == peers.index else (count,) for rank, count in enumerate(counts)],
    )
    pieces = []
    for rank in range(ranks):
        lengths = [size for size, owner in zip(sizes, owners, strict=True) if owner == rank]
        pieces.append(iter(torch.split(mine if rank == peers.index else received[rank], lengths)))
    for call, owner in zip(calls, owners, strict=True):
        yield _given(call, next(pieces[owner]).view(call.shape))


def _given(call: Call, tensor: Tensor) -> Any:
    """What a call returns, without its caches: nobody reads them."""
    return pytree.tree_unflatten([tensor, *[None] * (call.given.num_leaves - 1)], call.given)


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
