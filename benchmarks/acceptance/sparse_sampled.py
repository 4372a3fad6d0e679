"""Sparse attention of whole clips, whose tables of scores would not fit, checked at some of their tokens."""

from __future__ import annotations

import math

import torch
from acceptance.machine import Row
from torch import Tensor

from arachnec.kernels.sparse.key_lists import KeyLists, chosen_blocks
from arachnec.kernels.sparse.token_cubes import TokenCubes, order_on

SAMPLED = 64  # queries and keys
LIMIT = 1.6e-2


def sampled(heads: tuple[Tensor, ...], cubes: TokenCubes, lists: KeyLists, scale: float) -> Row:
    """Rows of the output and of all gradients of the last head, in float64, from the kernels' own log-sum-exp."""
    query, key, value = (x.detach().requires_grad_() for x in heads[:3])
    device, grad = query.device, heads[3]
    where = (order_on(cubes, device), cubes.groups, cubes.blocks, scale)
    run = torch.ops.arachnec.sparse_attention
    out, lse = run(query, key, value, None, lists.indices, lists.counts, *where)
    grads = torch.autograd.grad(out, (query, key, value), grad, retain_graph=True)
    again = torch.autograd.grad(out, (query, key, value), grad)
    second = run(query, key, value, None, lists.indices, lists.counts, *where)
    same = all(map(torch.equal, (*grads, out, lse), (*again, *second)))
    q, k, v, g, o, top = (x.detach()[0, -1].double() for x in (query, key, value, grad, out, lse))
    some = torch.linspace(0, len(q) - 1, min(SAMPLED, len(q)), device=device).long()
    table = chosen_blocks(lists, len(cubes.blocks) - 1)[0, -1]
    group_of, block_of = (cube_numbers(starts, cubes, device) for starts in (cubes.groups, cubes.blocks))
    seen = table[group_of[some]][:, block_of]
    scores = (q[some] @ k.T * scale).masked_fill(~seen, -math.inf)
    weights, delta = scores.softmax(-1), (g * o).sum(-1)
    slopes = weights * (g[some] @ v.T - delta[some, None])
    pairs = [(out, weights @ v, some), (grads[0], slopes @ k * scale, some)]
    reads = table[group_of][:, block_of[some]]
    weights = ((q @ k[some].T * scale - top[:, None]).exp() * reads).T
    slopes = weights * (g @ v[some].T - delta[:, None]).T
    pairs += [(grads[1], slopes @ q * scale, some), (grads[2], weights @ g, some)]
    off = [float((x.detach()[0, -1, at].double() - exact).norm() / exact.norm()) for x, exact, at in pairs]
    row: Row = {"sampled_rows": len(some), "tokens": len(q), "heads": query.shape[1], "error": max(off)}
    return {**row, "errors": off, "limit": LIMIT, "same_twice": same, "right": bool(max(off) <= LIMIT) and same}


def cube_numbers(starts: Tensor, cubes: TokenCubes, device: torch.device) -> Tensor:
    """[S]: of each token of the sequence, the number of its group or block."""
    numbers = torch.repeat_interleave(torch.arange(len(starts) - 1), starts.diff().long())
    return numbers[cubes.places].to(device)
