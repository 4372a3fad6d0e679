"""Blocks of attention as a ring merges them, forward and backward, against float64; and timed beside torch's own."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from acceptance.machine import Machine, Row, verdict
from torch import Tensor

from arachnec.kernels.attention.attention_block import Block, Visibility, attend, attend_backward
from arachnec.kernels.attention.exchange import even_ranges
from arachnec.kernels.attention.ring_attention import merge

LIMITS = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2}
HEAD, SCALE = 128, 128**-0.5
REPEATS = 5


def rows(machine: Machine) -> Iterator[Row]:
    heads, checked, timed = (2, 200, 256) if machine.dry else (12, 4000, 32760)
    for dtype, chunks, causal in itertools.product(LIMITS, (1, 3), (False, True)):
        given = tensors(heads, checked, dtype, machine.device)
        exact = whole([x.double() for x in given], causal)
        error = max(map(relative, in_blocks(given, chunks, causal), exact))
        row = {"tokens": checked, "chunks": chunks, "causal": causal, "dtype": str(dtype), "error": error}
        yield verdict(row, "error", LIMITS[dtype])
    given = tensors(heads, timed, torch.bfloat16, machine.device)
    work = 14 * heads * HEAD * timed**2  # FLOPs: two products forward, five backward
    forms: dict[str, Callable[[], Any]] = {"torch": lambda: whole(given, False)}
    forms |= {f"blocks of {chunks}": lambda chunks=chunks: in_blocks(given, chunks, False) for chunks in (1, 4)}
    for form, run in forms.items():
        ms = milliseconds(machine, run)
        yield {"form": form, "tokens": timed, "dtype": "torch.bfloat16", "both_ms": ms, "tflops": work / ms / 1e9}


def tensors(heads: int, tokens: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Query, key, value, and the gradient of the output."""
    torch.manual_seed(0)
    return [torch.randn(1, heads, tokens, HEAD, device=device).to(dtype) for _ in range(4)]


def whole(given: list[Tensor], causal: bool) -> list[Tensor]:
    query, key, value = (x.detach().requires_grad_() for x in given[:3])
    out = F.scaled_dot_product_attention(query, key, value, is_causal=causal, scale=SCALE)
    return [out.detach(), *torch.autograd.grad(out, (query, key, value), given[3])]


def in_blocks(given: list[Tensor], chunks: int, causal: bool) -> list[Tensor]:
    """Every chunk of queries against every chunk of keys, as ranks of a ring meet them."""
    query, key, value, grad = given
    ranges = even_ranges(query.shape[2], chunks)
    visibility = Visibility(None, causal)
    outs = []
    grads = [torch.zeros_like(x, dtype=torch.float32) for x in (query, key, value)]
    for mine in ranges:
        here, blocks = slice(*mine), [Block(visibility, (mine,), (other,)) for other in ranges]
        parts = [(key[:, :, slice(*other)], value[:, :, slice(*other)]) for other in ranges]
        merged = None
        for block, part in zip(blocks, parts, strict=True):
            out, lse = attend(query[:, :, here], *part, block, SCALE)
            merged = (out.float(), lse) if merged is None else merge(*merged, out, lse)
        assert merged is not None
        out, lse = merged[0].to(query.dtype), merged[1]
        outs.append(out)
        for other, block, part in zip(ranges, blocks, parts, strict=True):
            shares = attend_backward(grad[:, :, here], query[:, :, here], *part, out, lse, block, SCALE)
            for total, share, place in zip(grads, shares or (), (mine, other, other), strict=bool(shares)):
                total[:, :, slice(*place)] += share
    return [torch.cat(outs, 2), *grads]


def relative(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


def milliseconds(machine: Machine, run: Callable[[], Any]) -> float:
    """The median of some calls, after one."""
    spent = []
    for _ in range(REPEATS + 1):
        machine.synchronize()
        started = time.perf_counter()
        run()
        machine.synchronize()
        spent.append((time.perf_counter() - started) * 1e3)
    return statistics.median(spent[1:])
