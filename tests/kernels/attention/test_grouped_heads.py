"""Shared key heads: what a group of query heads gives them is one sum, rounded once and the same in every run."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from arachnec.kernels.attention.attention_block import Visibility, collect_heads, spread_heads
from arachnec.kernels.attention.distributed_attention import whole_attention

ROUNDING = 2**-8  # of bf16, to the nearest


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("sharing", [(4, 4), (3, 4, 1), (0, 2), (12,)])
def test_collecting_is_the_gradient_of_spreading(sharing: tuple[int, ...]) -> None:
    x = draw(2, len(sharing), 5, 3, dtype=torch.float64).requires_grad_()
    spread = spread_heads(x, sharing)
    assert spread.shape == (2, sum(sharing), 5, 3)
    grad = draw(2, sum(sharing), 5, 3, dtype=torch.float64)
    (wanted,) = torch.autograd.grad(spread, x, grad)
    torch.testing.assert_close(collect_heads(grad, sharing), wanted)


@pytest.mark.parametrize("sharing", [(8, 8), (3, 8, 5), (40,)])
def test_a_group_is_summed_with_one_rounding(sharing: tuple[int, ...]) -> None:
    grad = draw(2, sum(sharing), 64, 16)
    exact = collect_heads(grad.double(), sharing)
    once = collect_heads(grad, sharing).to(torch.bfloat16).double()
    assert bool(((once - exact).abs() <= ROUNDING * exact.abs() + 1e-6 * grad.double().abs().sum(1, True)).all())


def test_a_sum_in_the_gradients_own_precision_would_be_worse() -> None:
    grad = draw(2, 16, 64, 16)
    exact, once = collect_heads(grad.double(), (16,)), collect_heads(grad, (16,)).to(torch.bfloat16)
    rounded = torch.zeros_like(once).index_add_(1, torch.zeros(16, dtype=torch.int64), grad)
    assert (rounded.double() - exact).norm() > 1.5 * (once.double() - exact).norm()


def gradients(heads: int, key_heads: int, masked: bool) -> tuple[Tensor, ...]:
    query, key, value = (
        x.requires_grad_() for x in (draw(2, heads, 33, 16), draw(2, key_heads, 47, 16), draw(2, key_heads, 47, 8 * 2))
    )
    mask = draw(2, 1, 33, 47) > 0 if masked else None
    sharing = (heads // key_heads,) * key_heads
    out = whole_attention(query, key, value, visibility=Visibility(mask, False), scale=0.25, sharing=sharing)
    return torch.autograd.grad(out, (query, key, value), draw(*out.shape))


@pytest.mark.parametrize("masked", [False, True])
def test_two_runs_give_the_same_bits(masked: bool) -> None:
    for first, second in zip(gradients(12, 2, masked), gradients(12, 2, masked), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("masked", [False, True])
def test_key_heads_that_are_shared_have_gradients_as_good_as_those_that_are_not(masked: bool) -> None:
    """Against float64 on the same numbers, the error that sharing adds stays below one rounding."""
    query, key, value = draw(2, 12, 33, 16), draw(2, 2, 47, 16), draw(2, 2, 47, 16)
    mask = draw(2, 1, 33, 47) > 0 if masked else None
    grad = draw(2, 12, 33, 16)

    def run(dtype: torch.dtype, shared: bool) -> tuple[Tensor, Tensor]:
        leaves = [x.to(dtype) for x in (query, key, value)]
        sharing = (6, 6) if shared else None
        if not shared:
            leaves[1:] = [spread_heads(x, (6, 6)) for x in leaves[1:]]
        leaves = [x.requires_grad_() for x in leaves]
        out = whole_attention(*leaves, visibility=Visibility(mask, False), scale=0.25, sharing=sharing)
        _, of_key, of_value = torch.autograd.grad(out, leaves, grad.to(dtype))
        return of_key, of_value

    for exact, alone, got in zip(
        run(torch.float64, True), run(torch.bfloat16, False), run(torch.bfloat16, True), strict=True
    ):
        unavoidable = (collect_heads(alone.double(), (6, 6)) - exact).norm()
        assert (got.double() - exact).norm() <= unavoidable + ROUNDING * exact.norm()
