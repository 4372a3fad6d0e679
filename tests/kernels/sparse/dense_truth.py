"""Sparse attention over drawn lists, and dense attention under the same mask in float64, on any device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from arachnec.kernels.sparse.key_lists import KeyLists, chosen_blocks
from arachnec.kernels.sparse.sparse_attention import _sparse_attention
from arachnec.kernels.sparse.token_cubes import Grid, TokenCubes, token_cubes

SHARES = (0.0, 0.3, 0.7, 1.0)  # of the blocks that each head's lists have: nothing, all, and between
KINDS = ("", "keys", "bias")  # of a mask


@dataclass(frozen=True)
class Case:
    """Heads of ``size`` on a grid whose sides do not divide, with captions, under a mask of some kind."""

    size: int
    dtype: torch.dtype
    masked: str = ""
    grid: Grid = (3, 9, 14)
    captions: int = 37
    clips: int = 2

    @property
    def cubes(self) -> TokenCubes:
        return token_cubes(self.grid, captions=self.captions)


@dataclass(frozen=True)
class Given:
    """What a case computes with: query, key, value, the output's gradient; a mask; lists on the tensors' device."""

    heads: tuple[Tensor, ...]
    mask: Tensor | None
    lists: KeyLists


def given(case: Case, device: torch.device) -> Given:
    rng = torch.Generator().manual_seed(0)
    cubes, heads = case.cubes, len(SHARES)
    total, groups, blocks = len(cubes.order), len(cubes.groups) - 1, len(cubes.blocks) - 1
    drawn = torch.rand(case.clips, heads, groups, blocks, generator=rng)
    table = drawn < torch.tensor(SHARES)[None, :, None, None]
    lists = KeyLists(table.nonzero()[:, 3].int().to(device), table.sum(-1, dtype=torch.int32).to(device))
    shape = (case.clips, heads, total, case.size)
    tensors = tuple(torch.randn(shape, generator=rng).to(device, case.dtype) for _ in range(4))
    mask = None
    if case.masked == "keys":
        mask = torch.rand(case.clips, 1, 1, total, generator=rng) < 0.7
    if case.masked == "bias":
        mask = torch.randn(1, heads, total, total, generator=rng)
    return Given(tensors, None if mask is None else mask.to(device), lists)


def sparse(case: Case, given: Given) -> dict[str, Tensor]:
    """Output, log-sum-exp and gradients as the operator gives them on the tensors' device."""
    *heads, grad = given.heads
    query, key, value = (x.detach().requires_grad_() for x in heads)
    cubes, lists = case.cubes, given.lists
    where = (cubes.order.to(query.device), cubes.groups, cubes.blocks, case.size**-0.5)
    out, lse = _sparse_attention(query, key, value, given.mask, lists.indices, lists.counts, *where)
    grads = torch.autograd.grad(out, (query, key, value), grad)
    return {"out": out.detach(), "lse": lse, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def dense(case: Case, given: Given) -> dict[str, Tensor]:
    """The same in float64, by its definition."""
    *heads, grad = (x.double() for x in given.heads)
    query, key, value = (x.requires_grad_() for x in heads)
    scores = query @ key.mT * case.size**-0.5
    if given.mask is not None:
        hidden = given.mask.dtype == torch.bool
        scores = scores.masked_fill(~given.mask, -math.inf) if hidden else scores + given.mask.double()
    allowed = visible(given.lists, case.cubes).to(query.device)
    scores = scores.masked_fill(~allowed, -math.inf)
    sees = (scores > -math.inf).any(-1, keepdim=True)
    out = torch.where(sees, scores.softmax(-1), 0.0) @ value
    grads = torch.autograd.grad(out, (query, key, value), grad)
    lse = torch.where(sees[..., 0], scores.detach().logsumexp(-1), -math.inf)
    return {"out": out.detach(), "lse": lse, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}


def visible(lists: KeyLists, cubes: TokenCubes) -> Tensor:
    """[B, H, S, S] bool on the host, in the sequence's own order: captions see everything."""
    table = chosen_blocks(KeyLists(lists.indices.cpu(), lists.counts.cpu()), len(cubes.blocks) - 1)
    rows = torch.repeat_interleave(table, cubes.groups.diff(), 2)
    pairs = torch.repeat_interleave(rows, cubes.blocks.diff(), 3)
    captions = pairs.new_ones(*pairs.shape[:2], len(cubes.order) - cubes.video, len(cubes.order))
    return torch.cat([pairs, captions], 2)[:, :, cubes.places][..., cubes.places]


def errors(case: Case, given: Given) -> tuple[float, float, bool]:
    """Of output and gradients the largest relative error by norm; of the log-sum-exp that of its finite values, NaN
    where the wrong queries see nothing; and whether a second call gives the same bits."""
    computed, truth, again = sparse(case, given), dense(case, given), sparse(case, given)
    same = all(torch.equal(computed[name], again[name]) for name in computed)
    lse, exact = computed.pop("lse"), truth.pop("lse")
    sees = exact > -math.inf
    of_lse = relative(lse[sees], exact[sees]) if torch.equal(lse > -math.inf, sees) else math.nan
    return max(relative(computed[name], truth[name]) for name in computed), of_lse, same


def relative(value: Tensor, exact: Tensor) -> float:
    return float((value.detach().double() - exact).norm() / exact.norm())
