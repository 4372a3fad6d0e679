"""A block's output and gradients, fused or plain, in one tile or many, are those of softmax(scores) @ value."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from arachnec.kernels.attention import attention_block
from arachnec.kernels.attention.attention_backend import CPU_FLASH, CUDNN, EFFICIENT, FLASH2, MATH, attention_backend
from arachnec.kernels.attention.attention_block import Block, Visibility, attend, attend_backward, within
from arachnec.kernels.attention.fused_attention import DTYPES, capability_of, fused_backward, fused_forward
from arachnec.kernels.attention.ring_attention import merge


def draw(*shape: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)


def blocks(queries: int, keys: int) -> dict[str, Block]:
    random = torch.rand((2, 1, queries, keys), generator=torch.Generator().manual_seed(3)) > 0.4
    random[:, :, ::5] = False  # rows that see nothing
    random[:, :, :, : keys // 2] = False  # whole tiles of keys that nobody sees
    rows, columns = ((0, queries),), ((0, keys),)
    half = keys // 2
    return {
        "everything": Block(Visibility(None, False), rows, columns),
        "key mask": Block(Visibility(random[:, :, 1:2], False), rows, columns),
        "full mask": Block(Visibility(random, False), rows, columns),
        "gaps": Block(Visibility(random, False), ((0, queries),), ((3, half), (half + 2, keys))),
        "staircase": Block(Visibility(None, True), ((40, 40 + queries),), ((10, 10 + keys),)),
        "past": Block(Visibility(None, True), ((keys, keys + queries),), columns),
        "touching": Block(Visibility(None, True), ((keys - 1, keys - 1 + queries),), columns),
        "overlapping": Block(Visibility(None, True), ((keys - 2, keys - 2 + queries),), columns),
        "nearly future": Block(Visibility(None, True), rows, ((queries - 1, queries - 1 + keys),)),
        "future": Block(Visibility(None, True), rows, ((queries, queries + keys),)),
    }


def visible(block: Block, queries: int) -> Tensor:
    """The whole additive bias, from the definition."""
    rows = [p for first, end in block.queries for p in range(first, end)]
    columns = [p for first, end in block.keys for p in range(first, end)]
    if block.visibility.is_causal:
        seen = torch.tensor([[[[r >= c for c in columns] for r in rows]]])
    elif block.visibility.mask is None:
        seen = torch.ones(1, 1, len(rows), len(columns), dtype=torch.bool)
    else:
        seen = block.visibility.mask.expand(-1, -1, queries, -1)[:, :, rows][..., columns]
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -math.inf)


@pytest.mark.parametrize("kind", blocks(10, 10))
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("tile", [1 << 24, 3000])
def test_a_block_is_softmax_attention(kind: str, fused: bool, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_block, "TILE", tile)
    backend = CPU_FLASH if fused else MATH
    block = blocks(70, 1100)[kind]
    columns = sum(end - first for first, end in block.keys)
    query, key, value, grad = draw(2, 3, 70, 8), draw(2, 3, columns, 8), draw(2, 3, columns, 8) + 1, draw(2, 3, 70, 8)
    bias = visible(block, 70)
    scores = query @ key.mT * 0.3 + bias
    weights = scores.softmax(-1).nan_to_num(0.0)
    out, lse = attend(query, key, value, block, 0.3, backend)
    torch.testing.assert_close(out, weights @ value, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-11, atol=1e-11)

    wanted = [x.clone().requires_grad_() for x in (query, key, value)]
    dead = (bias == -math.inf).all(-1, keepdim=True)
    safe = bias.masked_fill(dead, 0.0)
    torch.autograd.backward(((wanted[0] @ wanted[1].mT * 0.3 + safe).softmax(-1) * ~dead) @ wanted[2], grad)
    shares = attend_backward(grad, query, key, value, out, lse.masked_fill(lse == -math.inf, 0.0), block, 0.3, backend)
    for share, leaf in zip(shares or [torch.zeros_like(x) for x in wanted], wanted, strict=True):
        torch.testing.assert_close(share, leaf.grad, rtol=1e-10, atol=1e-10)


def test_merging_two_blocks_is_attention_over_both_and_never_nan() -> None:
    query, key, value = draw(1, 2, 6, 4), draw(1, 2, 9, 4), draw(1, 2, 9, 4)
    whole = Block(Visibility(None, False), ((0, 6),), ((0, 9),))
    left, right = Block(whole.visibility, ((0, 6),), ((0, 4),)), Block(whole.visibility, ((0, 6),), ((4, 9),))
    parts = [attend(query, key[:, :, a:b], value[:, :, a:b], x, 0.5) for a, b, x in ((0, 4, left), (4, 9, right))]
    for got, wanted in zip(merge(*parts[0], *parts[1]), attend(query, key, value, whole, 0.5), strict=True):
        torch.testing.assert_close(got, wanted)
    nothing = (torch.zeros(1, 2, 6, 4, dtype=torch.float64), torch.full((1, 2, 6), -math.inf, dtype=torch.float64))
    for got, wanted in zip(merge(*nothing, *parts[0]), parts[0], strict=True):
        torch.testing.assert_close(got, wanted)
    out, lse = merge(*nothing, *nothing)
    assert not out.any() and bool((lse == -math.inf).all())


def test_a_slice_of_the_local_tokens_keeps_their_positions() -> None:
    ranges = ((10, 14), (30, 33))
    assert within(ranges, slice(0, 7)) == ranges
    assert within(ranges, slice(3, 6)) == ((13, 14), (30, 32))
    assert within(ranges, slice(4, 7)) == ((30, 33),)


@pytest.mark.parametrize(
    ("backend", "dtype", "masked"),
    [
        (FLASH2, torch.bfloat16, False),
        (CUDNN, torch.bfloat16, False),
        (EFFICIENT, torch.bfloat16, True),
        (EFFICIENT, torch.float32, False),
        (EFFICIENT, torch.float32, True),
    ],
)
def test_the_kernels_of_gpus_have_the_signatures_that_are_called(
    backend: str, dtype: torch.dtype, masked: bool
) -> None:
    query = torch.empty(2, 3, 50, 64, dtype=dtype, device="meta")
    key = torch.empty(2, 3, 70, 64, dtype=dtype, device="meta")
    bias = torch.empty(2, 1, 1, 70, dtype=dtype, device="meta") if masked else None
    out, lse = fused_forward(backend, query, key, key, bias, False, 0.1)
    assert (out.shape, lse.shape) == (query.shape, query.shape[:3])
    grads = fused_backward(backend, out, query, key, key, out, lse, bias, False, 0.1)
    assert [grad.shape for grad in grads] == [query.shape, key.shape, key.shape]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kind", blocks(10, 10))
@pytest.mark.parametrize(
    ("backend", "dtype", "tolerance"),
    [
        (EFFICIENT, torch.float32, 1e-4),
        (EFFICIENT, torch.bfloat16, 3e-2),
        (FLASH2, torch.bfloat16, 3e-2),
        (CUDNN, torch.bfloat16, 3e-2),
    ],
)
def test_a_block_on_a_gpu_is_that_of_exact_arithmetic(
    kind: str, backend: str, dtype: torch.dtype, tolerance: float
) -> None:
    capability = capability_of(torch.device("cuda"))
    if attention_backend(capability, DTYPES[dtype], 64, preferred=backend) != backend:
        pytest.skip(f"{capability} does not run {backend}")
    block = blocks(70, 1100)[kind]
    columns = sum(end - first for first, end in block.keys)
    shapes = ((2, 3, 70, 64), (2, 3, columns, 64), (2, 3, columns, 64), (2, 3, 70, 64))
    device_mask = None if block.visibility.mask is None else block.visibility.mask.cuda()
    on_gpu = Block(Visibility(device_mask, block.visibility.is_causal), block.queries, block.keys)
    results = []
    for here, where, number in ((block, "cpu", torch.float64), (on_gpu, "cuda", dtype)):
        query, key, value, grad = (draw(*shape).to(dtype).to(where, number) for shape in shapes)
        out, lse = attend(query, key, value, here, 0.1, backend)
        lse = lse.masked_fill(lse == -math.inf, 0.0)
        results.append((out, lse, *(attend_backward(grad, query, key, value, out, lse, here, 0.1, backend) or ())))
    for exact, got in zip(*results, strict=True):
        size = max(float(exact.norm()), 1e-3 * float(grad.norm()))  # where one key is seen, queries have no gradient
        assert float((got.cpu().double() - exact).norm()) <= tolerance * size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_memory_efficient_backward_gets_its_output_as_its_forward_lays_it(dtype: torch.dtype) -> None:
    """In 16 bits it takes that layout for granted: an output that was merged gives wrong gradients of queries."""
    query, out = (torch.empty(2, 3, 50, 64, dtype=dtype, device="meta") for _ in range(2))
    lse = torch.empty(2, 3, 50, device="meta")
    with Calls() as calls:
        fused_backward(EFFICIENT, out, query, query, query, out, lse, None, False, 0.1)
    (given,) = (args for name, args in calls.seen if name == "_scaled_dot_product_efficient_attention_backward")
    assert given[5].transpose(1, 2).is_contiguous()


class Calls(TorchDispatchMode):
    """Notes what is called, and with what."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((str(func.overloadpacket.__name__), args))
        return func(*args, **(kwargs or {}))
