"""Sparse attention on a CPU: the chosen key blocks of a group, gathered, through the fused attention of torch.

One head and one group at a time, in that order: nothing is summed in an order that depends on threads. At most
``PIECE`` keys are gathered at a time; pieces are merged by their log-sum-exp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from arachnec.kernels.attention.attention_backend import MATH
from arachnec.kernels.attention.attention_block import additive, plain_backward, plain_forward
from arachnec.kernels.attention.collectives import accumulator
from arachnec.kernels.attention.fused_attention import backend_for, fused_backward, fused_forward
from arachnec.kernels.attention.ring_attention import merge

PIECE = 1 << 14


@dataclass(frozen=True)
class Group:
    """The queries of one list, and what they attend to."""

    clip: int
    head: int
    queries: slice
    keys: Tensor | slice  # places of the chosen keys; a slice where these stand side by side


def gathered_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, groups: Iterator[Group], scale: float
) -> tuple[Tensor, Tensor]:
    """Output [B, H, Lq, Dv] and log-sum-exp [B, H, Lq]; a query that sees nothing has 0 and -inf."""
    out = query.new_zeros(*query.shape[:3], value.shape[3])
    lse = query.new_full(query.shape[:3], -math.inf, dtype=accumulator(query.dtype))
    for group in groups:
        at = (group.clip, group.head, group.queries)
        whole, total = None, None
        for keys in _pieces(group.keys):
            part, part_lse = _forward(query[at], *_taken(group, keys, key, value), _bias(mask, group, keys), scale)
            if whole is None or total is None:
                whole, total = part, part_lse
            else:
                whole, total = merge(whole, total, part.to(total.dtype), part_lse)
        if whole is not None and total is not None:
            out[at], lse[at] = whole, total
    return out, lse


def gathered_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    groups: Iterator[Group],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, in their own precision; those of keys are summed in 32 bits at least."""
    dtype = accumulator(query.dtype)
    of_query, of_key, of_value = (torch.zeros(x.shape, dtype=dtype) for x in (query, key, value))
    lse = lse.masked_fill(lse == -math.inf, 0.0)
    for group in groups:
        at = (group.clip, group.head, group.queries)
        for keys in _pieces(group.keys):
            taken = _taken(group, keys, key, value)
            dq, dk, dv = _backward(grad[at], query[at], *taken, out[at], lse[at], _bias(mask, group, keys), scale)
            of_query[at] += dq
            for total, part in ((of_key, dk), (of_value, dv)):
                if isinstance(keys, slice):
                    total[group.clip, group.head, keys] += part
                else:
                    total[group.clip, group.head].index_add_(0, keys, part.to(dtype))
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


def groups_of(indices: Tensor, counts: Tensor, groups: Tensor, blocks: Tensor) -> Iterator[Group]:
    """The groups whose lists are not empty, in order."""
    starts, ends = groups[:-1].tolist(), groups[1:].tolist()
    places = _places(blocks)
    uniform = bool((places >= 0).all())
    key_starts = blocks.tolist()
    listed = indices.tolist()
    first = 0
    for clip, of_clip in enumerate(counts.tolist()):
        for head, of_head in enumerate(of_clip):
            for group, count in enumerate(of_head):
                if count:
                    queries = slice(starts[group], ends[group])
                    low, high = listed[first], listed[first + count - 1]
                    if high - low == count - 1:
                        keys: Tensor | slice = slice(key_starts[low], key_starts[high + 1])
                    else:
                        keys = places[indices[first : first + count].long()].view(-1)
                        keys = keys if uniform else keys[keys >= 0]
                    yield Group(clip, head, queries, keys)
                first += count


def _places(blocks: Tensor) -> Tensor:
    """[N, tokens of the largest block] int64: the places of each block's tokens, and then -1."""
    step = torch.arange(int(blocks.diff().amax()))
    return torch.where(step < blocks.diff()[:, None], blocks[:-1, None] + step, -1)


def _pieces(keys: Tensor | slice) -> Iterator[Tensor | slice]:
    if isinstance(keys, slice):
        yield from (slice(at, min(at + PIECE, keys.stop)) for at in range(keys.start, keys.stop, PIECE))
    else:
        yield from torch.split(keys, PIECE)


def _taken(group: Group, keys: Tensor | slice, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    of_head = (x[group.clip, group.head] for x in (key, value))
    taken_key, taken_value = (x[keys] if isinstance(keys, slice) else x.index_select(0, keys) for x in of_head)
    return taken_key, taken_value


def _bias(mask: Tensor | None, group: Group, keys: Tensor | slice) -> Tensor | None:
    """What is added to the scores, [1, 1, rows or 1, keys]."""
    if mask is None:
        return None
    of_head = mask[group.clip % mask.shape[0], group.head % mask.shape[1]]
    rows = of_head if of_head.shape[0] == 1 else of_head[group.queries]
    return rows[:, keys][None, None]


def _forward(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    kernel = backend_for(query[None, None], value[None, None], masked=bias is not None)
    heads = (query[None, None], key[None, None], value[None, None])
    if kernel == MATH:
        bias = None if bias is None else additive(bias, accumulator(query.dtype))
        out, lse = plain_forward(*heads, bias, scale)
    else:
        bias = None if bias is None else additive(bias, query.dtype)
        out, lse = fused_forward(kernel, *heads, bias, False, scale)
    if bias is not None:
        dead = (bias == -math.inf).all(-1)
        out, lse = out.masked_fill(dead[..., None], 0.0), lse.masked_fill(dead, -math.inf)
    return out[0, 0], lse[0, 0]


def _backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = backend_for(query[None, None], value[None, None], masked=bias is not None)
    heads = (grad[None, None], query[None, None], key[None, None], value[None, None], out[None, None], lse[None, None])
    if kernel == MATH:
        bias = None if bias is None else additive(bias, accumulator(query.dtype))
        dq, dk, dv = plain_backward(*heads, bias, scale)
    else:
        bias = None if bias is None else additive(bias, query.dtype)
        dq, dk, dv = fused_backward(kernel, *heads, bias, False, scale)
    return dq[0, 0], dk[0, 0], dv[0, 0]
