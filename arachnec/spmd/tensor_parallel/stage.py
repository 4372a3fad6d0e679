"""How far the weights of an encoder can be divided, and what that costs: counted on the meta device, for its stage."""

from __future__ import annotations

from collections.abc import Sequence
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
from arachnec.tracing.formulas import GIB

META = torch.device("meta")
MOST = 200  # characters of a reason


def with_width(stage: Stage, encoder: nn.Module, clips: Sequence[VideoClip]) -> Stage:
    """The stage of an encoder of captions with what ranks can divide of it, or why they can nothing.

    Counted for the shortest and the longest caption. One that reads frames stays as it is. ``encoder`` is on the meta
    device.
    """
    few, many = (choose(clips, key=lambda clip: clip.text_tokens) for choose in (min, max))
    chosen = (few,) if few.text_tokens == many.text_tokens else (few, many)
    with META, torch.no_grad():
        loaded = [encoder.load(clip, META) for clip in chosen]  # type: ignore[operator]
        if loaded[0].dim() >= FRAMES or not any(parameter.dim() > 1 for parameter in encoder.parameters()):
            return stage
        try:
            cuts = cuts_of(encoder, loaded[0])
            if cuts.units < 2:
                raise NotDivisible("what its blocks view as heads has no common divisor")
            parts = [_part_of(encoder, cuts, x, clip.text_tokens) for x, clip in zip(loaded, chosen, strict=True)]
        except Exception as refused:  # whatever an encoder's own code does with a part, it still runs whole
            return replace(stage, attrs=stage.attrs.updated(tensor_whole=_reason(refused)))
    weights = dict(encoder.named_parameters())
    split = sum(weights[name].numel() * weights[name].itemsize for name in cuts.dims)
    attrs = stage.attrs.updated(
        tensor_split=Quantity(split / GIB, "GiB"),
        tensor_units=cuts.units,
        undivided=round(max(part.undivided for part in parts), 6),
        held=per_token([(part.tokens, part.held) for part in parts], "T"),
        halo=per_token([(part.tokens, part.bytes) for part in parts], "T"),
        exchanges=max(part.exchanges for part in parts),
    )
    return replace(stage, attrs=attrs)


def _reason(refused: Exception) -> str:
    if isinstance(refused, NotDivisible):
        return refused.reason
    return f"with a part of its weights it raised {' '.join(f'{type(refused).__name__}: {refused}'.split())}"[:MOST]


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
