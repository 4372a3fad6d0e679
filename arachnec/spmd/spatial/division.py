"""How far an encoder can be divided, and what that costs: counted on the meta device, as one rank of several."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from arachnec.data.clip import VideoClip
from arachnec.ir.nodes import Stage
from arachnec.ir.values import Formula, Term
from arachnec.spmd.spatial.encoding import FRAMES, Call, calls_of, encode_divided, owners_of
from arachnec.spmd.spatial.peers import Counted
from arachnec.spmd.spatial.split_tensor import NotDivisible, SplitTensor
from arachnec.tracing.cost import GIB
from arachnec.tracing.shell import PeakBytes

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
