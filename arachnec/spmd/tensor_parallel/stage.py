"""How far the weights of an encoder can be divided, and what that costs: counted on the meta device, for its stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from arachnec.data.clip import VideoClip
from arachnec.ir.nodes import Stage
from arachnec.ir.values import Quantity
from arachnec.spmd.spatial.division import RANKS, Counts, Part, per_token
from arachnec.spmd.spatial.encoding import FRAMES
from arachnec.spmd.spatial.peers import Counted
from arachnec.spmd.spatial.split_tensor import NotDivisible
from arachnec.spmd.tensor_parallel.weights import WeightCuts, cuts_of, encode_with_parts
from arachnec.tracing.cost import GIB

META = torch.device("meta")


def with_width(
    stage: Stage, encoder: nn.Module, clips: Sequence[VideoClip], tokens: Callable[[VideoClip], int]
) -> Stage:
    """The stage of an encoder with what ranks can divide of its weights, or why they can nothing.

    Counted for the shortest and the longest clip, by captions if it reads nothing else. One that reads frames stays as
    it is. ``encoder`` is on the meta device.
    """
    with META, torch.no_grad():
        captions = _reads_captions(encoder, clips[0])
        length: Callable[[VideoClip], int] = (lambda clip: clip.text_tokens) if captions else tokens
        few, many = min(clips, key=length), max(clips, key=length)
        chosen = (few,) if length(few) == length(many) else (few, many)
        loaded = [encoder.load(clip, META) for clip in chosen]  # type: ignore[operator]
        matrices = any(parameter.dim() > 1 for parameter in encoder.parameters())
        if loaded[0].dim() >= FRAMES or not loaded[0].numel() or not matrices:
            return stage
        try:
            cuts = cuts_of(encoder, loaded[0])
            if cuts.units < 2:
                raise NotDivisible("what its blocks view as heads has no common divisor")
            parts = [_part_of(encoder, cuts, x, length(clip)) for x, clip in zip(loaded, chosen, strict=True)]
        except Exception as refused:  # whatever an encoder's own code does with a part, it still runs whole
            return replace(stage, attrs=stage.attrs.updated(tensor_whole=_reason(refused)))
    weights = dict(encoder.named_parameters())
    symbol = "T" if captions else "S"
    split = sum(weights[name].numel() * weights[name].itemsize for name in cuts.dims)
    attrs = stage.attrs.updated(
        tensor_split=Quantity(split / GIB, "GiB"),
        tensor_units=cuts.units,
        undivided=round(max(part.undivided for part in parts), 6),
        held=per_token([(part.tokens, part.held) for part in parts], symbol),
        halo=per_token([(part.tokens, part.bytes) for part in parts], symbol),
        exchanges=max(part.exchanges for part in parts),
    )
    return replace(stage, attrs=attrs)


def _reads_captions(encoder: nn.Module, clip: VideoClip) -> bool:
    """Whether what it loads has the same shape for a longer clip with the same caption."""
    shapes = (encoder.load(one, META).shape for one in (clip, replace(clip, frames=clip.frames + 8)))  # type: ignore[operator]
    return bool(next(shapes) == next(shapes))


def _reason(refused: Exception) -> str:
    if isinstance(refused, NotDivisible):
        return refused.reason
    return f"with a part of its weights it raised {' '.join(f'{type(refused).__name__}: {refused}'.split())}"[:200]


def _part_of(encoder: nn.Module, cuts: WeightCuts, loaded: torch.Tensor, tokens: int) -> Part:
    """What the rank does that has most, of as many as are thought of."""
    ranks = min(RANKS, cuts.units)
    alone, shared, peers = Counts(), Counts(), Counted(ranks - 1)
    with alone.bytes, alone.flops:
        encoder(loaded)
    parts = cuts.parts(dict(encoder.named_parameters()), ranks, ranks - 1)
    with shared.bytes, shared.flops:
        encode_with_parts(encoder, parts, loaded, peers, ranks)
    work = shared.flops.total, alone.flops.total
    return Part(tokens, cuts.units, ranks, *work, shared.bytes.peak, alone.bytes.peak, peers.bytes, peers.calls)
