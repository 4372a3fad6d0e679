"""Attention over a sequence that is sharded over ranks: Ulysses, ring, and their product.

Every part of the sequence is first sharded by tokens; replicated parts, such as a caption, are sliced. Inside a Ulysses
group an all-to-all then trades tokens for heads (DeepSpeed Ulysses, arXiv 2309.14509). Between Ulysses groups keys and
values pass round a ring (Ring Attention, arXiv 2310.01889; the product: USP, arXiv 2405.07719). Heads and tokens are
split as evenly as possible, so every degree is legal: with more ranks than heads, some ranks hold none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from arachnec.kernels.attention.attention_block import (
    Block,
    Ranges,
    Sharing,
    Visibility,
    attend,
    attend_backward,
    collect_heads,
    spread_heads,
)
from arachnec.kernels.attention.chosen_keys import Capacity, ChosenKeys
from arachnec.kernels.attention.divided_heads import DividedHeads, Division, HeadShare, whole_heads
from arachnec.kernels.attention.exchange import (
    even_ranges,
    gather_pieces,
    heads_to_tokens,
    moved_to_heads,
    moved_to_tokens,
    tokens_to_heads,
)
from arachnec.kernels.attention.ring_attention import ring_attention
from arachnec.kernels.attention.sequence_shard import SequenceShard, even_split, offsets


def whole_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    visibility: Visibility,
    scale: float,
    sharing: Sharing | None = None,
    backend: str | None = None,
) -> Tensor:
    """Attention of ``query`` [B, H, Lq, D] over ``key`` [B, Hk, Lk, D] and ``value`` [B, Hk, Lk, Dv].

    ``sharing`` says how many query heads use each key head, None for one each; ``backend`` is the kernel family to
    prefer. Returns [B, H, Lq, Dv]; a query that sees nothing gives 0.
    """
    rows, columns = (((0, x.shape[2]),) if x.shape[2] else () for x in (query, key))
    call = _Call(Block(visibility, rows, columns), scale, sharing, backend)
    out: Tensor = _Whole.apply(call, query, key, value)  # type: ignore[no-untyped-call]
    return out


@dataclass(frozen=True)
class _Call:
    """What is not differentiated."""

    block: Block
    scale: float
    sharing: Sharing | None
    backend: str | None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = spread_heads(key, call.sharing), spread_heads(value, call.sharing)
        out, lse = attend(query, keys, values, call.block, call.scale, call.backend)
        ctx.call = call
        ctx.save_for_backward(query, key, value, out, lse.masked_fill_(lse == -math.inf, 0.0))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        query, key, value, out, lse = ctx.saved_tensors
        keys, values = spread_heads(key, call.sharing), spread_heads(value, call.sharing)
        shares = attend_backward(grad.contiguous(), query, keys, values, out, lse, call.block, call.scale, call.backend)
        if shares is None:
            return None, torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        of_query, of_key, of_value = shares
        of_key, of_value = collect_heads(of_key, call.sharing), collect_heads(of_value, call.sharing)
        return None, of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


Parts = tuple[int | None, ...]
Range = tuple[int, int]
Counts = tuple[tuple[int, ...], ...]  # tokens of each part at each position
# query, key, value, mask, scale, and which heads these are, to their output
OfHeads = Callable[[Tensor, Tensor, Tensor, Tensor | None, float, tuple[HeadShare, ...]], Tensor]


class KeyFetch(Protocol):
    """Which keys a rank gets of its heads, chosen before they come. ``division`` is that of all ranks of the shard,
    ``counts`` are the keys of each part at each position."""

    @property
    def block_of(self) -> Tensor:
        """[S] int64 on the host: the block of every key of the whole sequence."""

    def wanted(self, query: Tensor, key: Tensor, division: Division, counts: Counts, shard: SequenceShard) -> Tensor:
        """[B, own shares, blocks] bool: what own queries need. ``query`` are own heads [B, shares, S, D], ``key`` own
        tokens [B, H, L, D]. Collective."""

    def capacity(self, division: Division, counts: Counts, shard: SequenceShard) -> Capacity:
        """Rows that each share may get of each holder, the same on all ranks."""

    def note(self, overflowed: Tensor) -> None:
        """Whether some wanted key had no room, a bool on the device: zeros are in its place then."""


def distributed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shard: SequenceShard,
    *,
    query_parts: Parts,
    key_parts: Parts,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    local: OfHeads | None = None,
    division: Division | None = None,
    fetch: KeyFetch | None = None,
) -> Tensor:
    """``scaled_dot_product_attention`` over the whole sequence, on this rank's share of it.

    ``query`` is [B, H, Lq, D], ``key`` [B, Hk, Lk, D], ``value`` [B, Hk, Lk, Dv], with H a multiple of Hk under
    ``enable_gqa``. ``query_parts`` and ``key_parts`` say what stands along the local tokens, in order: None is the
    sharded sequence (``shard.local`` tokens here), a number that many replicated tokens, of equal values on every rank.
    ``mask`` is replicated and global: [B or 1, H or 1, all queries or 1, all keys], boolean (True takes part) or added
    to the scores, its rows and columns in the order of the parts. It gets no gradient. ``is_causal`` compares positions
    in that same order. A query that may look at nothing yields 0, as in torch. ``local`` computes the attention of a
    rank's heads over all tokens instead: these are divided over all ranks, whatever the grid, nothing is causal, and no
    head shares keys. ``division`` says which heads, and which queries of them, a rank has then; without it these are
    even runs. With a ``fetch`` a rank gets only the keys that its queries chose, where there is room for them, and all
    keys without.

    Returns [B, H, Lq, Dv]; replicated parts are again the same on every rank. Gradients are partial in the sense of
    ``arachnec.kernels.attention.exchange``. Raises ValueError for shapes that do not fit together.
    """
    _check(query, key, value, shard, query_parts, key_parts, mask, is_causal, enable_gqa)
    scale = query.shape[3] ** -0.5 if scale is None else scale
    total, sharing, me = query.shape[1], query.shape[1] // max(1, key.shape[1]), shard.index % shard.ulysses
    if shard.degree == 1 and local is not None:
        return local(query, key, value, mask, scale, tuple(map(HeadShare, range(total))))
    if shard.degree == 1:
        shared = _sharing((0, total), (0, key.shape[1]), sharing)
        visibility = Visibility(mask, is_causal)
        return whole_attention(
            query, key, value, visibility=visibility, scale=scale, sharing=shared, backend=shard.attention
        )
    queries, keys = _token_counts(query_parts, shard), _token_counts(key_parts, shard)
    query = _shard_parts(query, query_parts, shard)
    key, value = _shard_parts(key, key_parts, shard), _shard_parts(value, key_parts, shard)

    if local is not None:
        out = _by_division(
            (query, key, value),
            (queries, keys, keys),
            mask,
            scale,
            local,
            division or whole_heads(total, shard.degree),
            shard,
            fetch,
        )
        return _gather_parts(out, query_parts, queries, shard)
    query_heads = even_ranges(total, shard.ulysses)
    key_heads = tuple((first // sharing, -(-end // sharing)) for first, end in query_heads)
    here = slice(shard.ulysses_positions[0], shard.ulysses_positions[-1] + 1)
    peers_queries, peers_keys = _at(queries, here), _at(keys, here)
    if shard.ulysses > 1:
        query, key, value = tokens_to_heads(
            (query, key, value), (query_heads, key_heads, key_heads), (peers_queries, peers_keys, peers_keys), shard
        )
    if mask is not None and mask.shape[1] > 1:
        mask = mask[:, slice(*query_heads[me])]
    shared, visibility = _sharing(query_heads[me], key_heads[me], sharing), Visibility(mask, is_causal)
    if shard.ring == 1:
        out = whole_attention(
            query, key, value, visibility=visibility, scale=scale, sharing=shared, backend=shard.attention
        )
    else:
        out = ring_attention(
            query,
            key,
            value,
            shard,
            queries=_ranges(queries, here),
            keys=tuple(
                _ranges(keys, slice(first, first + shard.ulysses)) for first in range(0, shard.degree, shard.ulysses)
            ),
            visibility=visibility,
            scale=scale,
            sharing=shared,
        )
    if shard.ulysses > 1:
        out = heads_to_tokens(out, total, query_heads, peers_queries, shard)
    return _gather_parts(out, query_parts, queries, shard)


def _by_division(
    tensors: tuple[Tensor, Tensor, Tensor],
    counts: tuple[Counts, Counts, Counts],
    mask: Tensor | None,
    scale: float,
    local: OfHeads,
    division: Division,
    shard: SequenceShard,
    fetch: KeyFetch | None,
) -> Tensor:
    """The output at this rank's tokens, of all heads."""
    own, total = division[shard.index], tensors[0].shape[1]
    if fetch is None:
        query, key, value = moved_to_heads(DividedHeads(division, (True, False, False), counts, shard), tensors)
    else:
        (query,) = moved_to_heads(DividedHeads(division, (True,), counts[:1], shard), tensors[:1])
        wanted = fetch.wanted(query.detach(), tensors[1].detach(), division, counts[1], shard)
        capacity = fetch.capacity(division, counts[1], shard)
        keys = ChosenKeys(division, counts[1], shard, wanted, fetch.block_of, capacity)
        key, value = moved_to_heads(keys, tensors[1:])
        fetch.note(keys.overflowed)
    if mask is not None and mask.shape[1] > 1:
        mask = mask[:, [share.head for share in own]]
    out = local(query, key, value, mask, scale, own)
    return moved_to_tokens(DividedHeads(division, (True,), counts[:1], shard), out, total)


def _sharing(queries: Range, keys: Range, sharing: int) -> Sharing | None:
    """How many of this rank's query heads use each of its key heads; None where they are the same heads."""
    if sharing == 1:
        return None
    first, end = queries
    return tuple(max(0, min(end, (k + 1) * sharing) - max(first, k * sharing)) for k in range(*keys))


def _token_counts(parts: Parts, shard: SequenceShard) -> Counts:
    """Tokens of each part at each position, once everything is sharded."""
    return tuple(shard.tokens if part is None else even_split(part, shard.degree) for part in parts)


def _at(counts: Counts, positions: slice) -> Counts:
    return tuple(part[positions] for part in counts)


def _ranges(counts: Counts, positions: slice) -> Ranges:
    """Where the tokens of these positions stand in the whole sequence, all parts in order."""
    starts = offsets(tuple(sum(part) for part in counts))
    ranges = []
    for start, part in zip(starts, counts, strict=True):
        first = start + sum(part[: positions.start])
        ranges.append((first, first + sum(part[positions])))
    return tuple((first, end) for first, end in ranges if first < end)


def _shard_parts(x: Tensor, parts: Parts, shard: SequenceShard) -> Tensor:
    """The replicated parts sliced over the ranks; their gradients are zero elsewhere."""
    if all(part is None for part in parts):
        return x
    pieces = x.split_with_sizes([shard.local if part is None else part for part in parts], 2)
    own = [p if part is None else _slice(p, part, shard) for p, part in zip(pieces, parts, strict=True)]
    return torch.cat(own, 2)


def _slice(piece: Tensor, length: int, shard: SequenceShard) -> Tensor:
    sizes = even_split(length, shard.degree)
    return piece.narrow(2, sum(sizes[: shard.index]), sizes[shard.index])


def _gather_parts(x: Tensor, parts: Parts, counts: Counts, shard: SequenceShard) -> Tensor:
    """The inverse of ``_shard_parts``."""
    if all(part is None for part in parts):
        return x
    pieces = x.split_with_sizes([sizes[shard.index] for sizes in counts], 2)
    gathered = [
        piece if part is None else gather_pieces(piece, 2, sizes, shard)
        for piece, part, sizes in zip(pieces, parts, counts, strict=True)
    ]
    return torch.cat(gathered, 2)


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shard: SequenceShard,
    query_parts: Parts,
    key_parts: Parts,
    mask: Tensor | None,
    is_causal: bool,
    enable_gqa: bool,
) -> None:
    for name, x, parts in (("query", query, query_parts), ("key", key, key_parts), ("value", value, key_parts)):
        expected = sum(shard.local if part is None else part for part in parts)
        if x.ndim != 4 or x.shape[2] != expected:
            raise ValueError(f"{name} {tuple(x.shape)} does not have the {expected} local tokens of its parts {parts}")
    if key.shape[1] != value.shape[1] or query.shape[1] % max(1, key.shape[1]):
        raise ValueError(
            f"{query.shape[1]} query heads cannot share {key.shape[1]} key and {value.shape[1]} value heads"
        )
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError(f"{query.shape[1]} query heads and {key.shape[1]} key heads need enable_gqa")
    if mask is None:
        return
    if is_causal:
        raise ValueError("a mask and is_causal exclude each other")
    if mask.requires_grad:
        raise ValueError("a mask that wants a gradient is not supported")
    rows, columns = (sum(shard.total if part is None else part for part in parts) for parts in (query_parts, key_parts))
    if mask.ndim != 4 or mask.shape[-2] not in (1, rows) or mask.shape[-1] != columns:
        raise ValueError(f"mask {tuple(mask.shape)} is not [.., .., {rows} or 1, {columns}], all tokens of the parts")
