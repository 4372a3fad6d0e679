"""How far an encoder can be divided and what that costs, and one clip's encoding so: frames cut, or tiles dealt out.

A VAE of tiles calls its ``encoder`` once a tile, and once a chunk of time of each. Calls that are given nothing but
their pixels begin a tile; those that are given a cache, or find one in a module, go on with the tile before. The VAE's
code runs twice: first every rank runs the calls of its tiles, then all calls give what somebody has made, and the VAE
blends it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from arachnec.data.clip import VideoClip
from arachnec.ir.nodes import Stage
from arachnec.ir.values import Formula, Term
from arachnec.models.encoders import tiles_called, tiling_vae
from arachnec.spmd.spatial.operators import sharing
from arachnec.spmd.spatial.peers import Counted, Peers
from arachnec.spmd.spatial.split_tensor import NotDivisible, SplitTensor, split
from arachnec.tracing.cost import GIB
from arachnec.tracing.shell import PeakBytes


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


RANKS = 4  # that are thought of, where a clip can be shared by so many


@dataclass(frozen=True)
class Part:
    """What one rank of several does for a clip of so many ``tokens``."""

    tokens: int
    most: int  # ranks that can share the clip
    ranks: int
    flops: int
    flops_alone: int
    peak: int  # bytes
    peak_alone: int
    bytes: int  # that it exchanges
    exchanges: int
    tiles: bool = False  # as many bytes at once as one rank alone

    @property
    def undivided(self) -> float:
        """The part of the work that every rank does, of what one rank alone does."""
        return _every_ranks(self.flops, self.flops_alone, self.ranks) / max(1, self.flops_alone)

    @property
    def held(self) -> float:
        """Bytes that every rank needs, whatever their number."""
        return _every_ranks(self.peak, self.peak_alone, self.ranks)


def _every_ranks(part: float, alone: float, ranks: int) -> float:
    """The x in ``part = x + (alone - x) / ranks``."""
    return min(alone, max(0.0, (part - alone / ranks) / (1 - 1 / ranks)))


def divided_stage(
    stage: Stage, encoder: nn.Module, clips: Sequence[VideoClip], tokens: Callable[[VideoClip], int]
) -> tuple[Stage, str | None]:
    """An encoder's stage with how ranks share its clips, or as it is, and why frames are not shared.

    Counted for the clips with the fewest and with the most tokens. ``encoder`` is on the meta device.
    """
    few, many = min(clips, key=tokens), max(clips, key=tokens)
    chosen = (few,) if tokens(few) == tokens(many) else (few, many)
    try:
        parts = [part_of(encoder, clip, tokens(clip)) for clip in chosen]
    except NotDivisible as refused:
        return stage, f"`{stage.name}` encodes every clip on one rank: {refused.reason}"
    if any(part is None or part.most < 2 for part in parts):
        return stage, None
    known = [part for part in parts if part is not None]
    tiles = any(part.tiles for part in known)
    attrs = stage.attrs.updated(
        divides=min(part.most for part in known),
        undivided=round(max(part.undivided for part in known), 6),
        held=stage.attrs["workspace"] if tiles else per_token([(part.tokens, part.held) for part in known]),
        halo=per_token([(part.tokens, part.bytes) for part in known]),
        exchanges=max(part.exchanges for part in known),
    )
    return replace(stage, attrs=attrs), None


def per_token(points: Sequence[tuple[int, float]], symbol: str = "S") -> Formula:
    """GiB for B clips of so many tokens each, ``symbol``: the line through one or two points that is nowhere below
    them, nor below 0."""
    slope = max(size / tokens for tokens, size in points)
    constant = 0.0
    if len(points) == 2:
        (few, small), (many, large) = points
        slope = max(0.0, (large - small) / (many - few))
        constant = max(0.0, small - slope * few)
        slope = max((size - constant) / tokens for tokens, size in points)
    terms = [Term(slope / GIB, (("B", 1), (symbol, 1))), Term(constant / GIB, (("B", 1),))]
    return Formula(tuple(term for term in terms if term.coefficient > 0) or (Term(0.0),), "GiB")


def part_of(encoder: nn.Module, clip: VideoClip, tokens: int) -> Part | None:
    """What one of several ranks does for a clip; None where the encoder reads no frames.

    Raises NotDivisible where they cannot share it.
    """
    meta = torch.device("meta")
    with meta, torch.no_grad():
        loaded = encoder.load(clip, meta)  # type: ignore[operator]
        if loaded.dim() < FRAMES:
            return None
        if calls := calls_of(encoder, loaded):
            return _of_tiles(calls, tokens)
        alone = Counts()
        with alone.bytes, alone.flops:
            output = encoder(loaded)
        most = max(output.shape[-2:])
        ranks = min(RANKS, most)
        shared, peers = Counts(), Counted(ranks - 1)
        with shared.bytes, shared.flops:
            encode_divided(encoder, loaded, peers, ranks)
    work = shared.flops.total, alone.flops.total
    return Part(tokens, most, ranks, *work, shared.bytes.peak, alone.bytes.peak, peers.bytes, peers.calls)


def _of_tiles(calls: Sequence[Call], tokens: int) -> Part:
    """The rank with most tiles, and all that was made; its memory is that of one tile, as on one rank."""
    most = calls[-1].tile + 1
    ranks = min(RANKS, most)
    owners = owners_of(calls, ranks)
    loads = [
        sum(call.pixels for call, owner in zip(calls, owners, strict=True) if owner == rank) for rank in range(ranks)
    ]
    size = sum(math.prod(call.shape) * call.dtype.itemsize for call in calls)
    return Part(tokens, most, ranks, max(loads), sum(loads), 0, 0, size, 1, tiles=True)


class _PartBytes(PeakBytes):  # type: ignore[no-untyped-call]
    """Of what the rank holds: a tensor that ranks share is looked into."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented if SplitTensor in types else super().__torch_dispatch__(func, types, args, kwargs)


class _PartFlops(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Floating-point operations of the rank."""

    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if SplitTensor in types:
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func.overloadpacket)
        if count is not None:
            self.total += count(*args, **(kwargs or {}), out_val=result)
        return result


class Counts:
    """What one rank does: ``bytes.peak`` at once, and ``flops.total``."""

    def __init__(self) -> None:
        self.bytes, self.flops = _PartBytes(), _PartFlops()  # type: ignore[no-untyped-call]
