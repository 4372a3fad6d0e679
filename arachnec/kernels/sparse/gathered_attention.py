"""Sparse attention on a CPU: the chosen key blocks of a group, gathered, through the fused attention of torch.

One head and one group at a time, in that order: nothing is summed in an order that depends on threads. At most
``PIECE`` keys are gathered at a time; pieces are merged by their log-sum-exp. For a list of everything
nothing is gathered.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from arachnec.kernels.attention.attention_block import Attended, Heads, biased_backward, biased_forward
from arachnec.kernels.attention.collectives import accumulator
from arachnec.kernels.attention.fused_attention import backend_for
from arachnec.kernels.attention.ring_attention import merge

PIECE = 1 << 14


@dataclass(frozen=True)
class Group:
    """The queries of one list, and what they attend to."""

    clip: int
    head: int
    queries: Tensor  # their tokens, [n] int64
    keys: Tensor | None  # the tokens of the chosen keys, [m] int64; None where these are all


def gathered_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, groups: Iterator[Group], scale: float
) -> tuple[Tensor, Tensor]:
    """Output [B, H, Lq, Dv] and log-sum-exp [B, H, Lq]; a query that sees nothing has 0 and -inf."""
    out = query.new_zeros(*query.shape[:3], value.shape[3])
    query = query.contiguous()
    lse = query.new_full(query.shape[:3], -math.inf, dtype=accumulator(query.dtype))
    taken = _Gather(key, value)
    for group in groups:
        head = (group.clip, group.head)
        rows = query[head].index_select(0, group.queries)
        whole, total = None, None
        for keys in _pieces(group.keys):
            read = _heads(rows, *taken(group, keys), _bias(mask, group, keys), scale)
            part, part_lse = (x[0, 0] for x in biased_forward(*read))
            if whole is None or total is None:
                whole, total = part, part_lse
            else:
                whole, total = merge(whole, total, part.to(total.dtype), part_lse)
        if whole is not None and total is not None:
            out[head].index_copy_(0, group.queries, whole.to(out.dtype))
            lse[head].index_copy_(0, group.queries, total)
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
    taken = _Gather(key, value)
    grad, query, out = grad.contiguous(), query.contiguous(), out.contiguous()
    for group in groups:
        head = (group.clip, group.head)
        of_rows, *of_group = (x[head].index_select(0, group.queries) for x in (query, grad, out, lse))
        attended = Attended(*(x[None, None] for x in of_group))
        for keys in _pieces(group.keys):
            read = _heads(of_rows, *taken(group, keys), _bias(mask, group, keys), scale)
            dq, dk, dv = (x[0, 0] for x in biased_backward(*read, attended))
            of_query[head].index_add_(0, group.queries, dq.to(dtype))
            for total, part in ((of_key, dk), (of_value, dv)):
                if keys is None:
                    total[head] += part
                else:
                    total[head].index_add_(0, keys, part.to(dtype))
    return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype)


def groups_of(indices: Tensor, counts: Tensor, order: Tensor, groups: Tensor, blocks: Tensor) -> Iterator[Group]:
    """The groups whose lists are not empty, in order, and after each head's the queries that are in no group."""
    queries = torch.split(order, [*groups.diff().tolist(), len(order) - int(groups[-1])])
    places = _places(order, blocks)
    uniform = bool((places >= 0).all())
    lists = iter(torch.split(indices.long(), counts.view(-1).tolist()))
    for clip, head in itertools.product(range(counts.shape[0]), range(counts.shape[1])):
        for rows in queries[:-1]:
            chosen = next(lists)
            if len(chosen) == len(places):
                yield Group(clip, head, rows, None)
            elif len(chosen):
                keys = places[chosen].view(-1)
                yield Group(clip, head, rows, keys if uniform else keys[keys >= 0])
        if len(queries[-1]):
            yield Group(clip, head, queries[-1], None)


def _places(order: Tensor, blocks: Tensor) -> Tensor:
    """[N, tokens of the largest block] int64: the tokens of each block, and then -1."""
    step = torch.arange(int(blocks.diff().amax()))
    inside = step < blocks.diff()[:, None]
    return torch.where(inside, order[(blocks[:-1, None] + step).clamp_max(len(order) - 1)], -1)


def _pieces(keys: Tensor | None) -> Iterator[Tensor | None]:
    if keys is None:
        yield None
    else:
        yield from torch.split(keys, PIECE)


class _Gather:
    """The chosen keys and values, in buffers that are used again: fresh memory would cost a page fault every 4 KiB."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.heads = (key.contiguous(), value.contiguous())
        rows = min(PIECE, key.shape[2])
        self._buffers = tuple(x.new_empty(rows, x.shape[3]) for x in self.heads)

    def __call__(self, group: Group, keys: Tensor | None) -> tuple[Tensor, Tensor]:
        key, value = (x[group.clip, group.head] for x in self.heads)
        if keys is None:
            return key, value
        rows = (buffer[: len(keys)] for buffer in self._buffers)
        for x, buffer in zip((key, value), gathered := tuple(rows), strict=True):
            torch.index_select(x, 0, keys, out=buffer)
        return gathered[0], gathered[1]


def _bias(mask: Tensor | None, group: Group, keys: Tensor | None) -> Tensor | None:
    """What is added to the scores, [1, 1, rows or 1, keys]."""
    if mask is None:
        return None
    of_head = mask[group.clip % mask.shape[0], group.head % mask.shape[1]]
    rows = of_head if of_head.shape[0] == 1 else of_head.index_select(0, group.queries)
    return (rows if keys is None else rows.index_select(1, keys))[None, None]


def _heads(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, scale: float) -> tuple[str, Heads]:
    """One head, and the kernel family for it."""
    query, key, value = query[None, None], key[None, None], value[None, None]
    return backend_for(query, value, masked=bias is not None), Heads(query, key, value, bias, scale)
