"""Sparse attention over drawn lists is dense attention under the same mask, in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from arachnec.kernels.sparse import gathered_attention
from arachnec.kernels.sparse.key_lists import KeyLists, checked_lists, chosen_blocks, full_lists
from arachnec.kernels.sparse.sparse_attention import sparse_attention
from arachnec.kernels.sparse.token_cubes import TokenCubes, token_cubes


def drawn_lists(seed: int, clips: int, heads: int, cubes: TokenCubes, share: float) -> KeyLists:
    rng = torch.Generator().manual_seed(seed)
    groups, blocks = len(cubes.groups) - 1, len(cubes.blocks) - 1
    table = torch.rand(clips, heads, groups, blocks, generator=rng) < share * torch.rand(clips, heads, 1, 1) * 2
    return KeyLists(table.nonzero()[:, 3].int(), table.sum(-1, dtype=torch.int32))


def visible(lists: KeyLists, cubes: TokenCubes) -> Tensor:
    """[B, H, S, S] bool, in the sequence's own order: captions see everything."""
    table = chosen_blocks(lists, len(cubes.blocks) - 1)
    rows = torch.repeat_interleave(table, cubes.groups.diff(), 2)
    pairs = torch.repeat_interleave(rows, cubes.blocks.diff(), 3)
    captions = pairs.new_ones(*pairs.shape[:2], len(cubes.order) - cubes.video, len(cubes.order))
    return torch.cat([pairs, captions], 2)[:, :, cubes.places][..., cubes.places]


def dense(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, bias: Tensor | None) -> Tensor:
    scores = query @ key.mT * query.shape[3] ** -0.5
    if bias is not None:
        scores = scores.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else scores + bias
    scores = scores.masked_fill(~allowed, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ value


def heads_of(cubes: TokenCubes, clips: int, heads: int, size: int, value_size: int) -> tuple[Tensor, ...]:
    return (
        torch.randn(clips, heads, len(cubes.order), size),
        torch.randn(clips, len(cubes.order), heads, size).transpose(1, 2),
        torch.randn(clips, heads, len(cubes.order), value_size),
    )


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1 << 16),
    grid=st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 9)),
    captions=st.integers(0, 9),
    first=st.booleans(),
    clips=st.integers(1, 2),
    sizes=st.sampled_from([(16, 16), (64, 64), (24, 8)]),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    masked=st.sampled_from(["", "keys", "bias"]),
    piece=st.sampled_from([7, 1 << 14]),
)
def test_any_lists_equal_dense_attention_under_their_mask(
    seed: int,
    grid: tuple[int, int, int],
    captions: int,
    first: bool,
    clips: int,
    sizes: tuple[int, int],
    share: float,
    masked: str,
    piece: int,
) -> None:
    torch.manual_seed(seed)
    cubes = token_cubes(grid, captions=captions, captions_first=first, queries=32, keys=8, cell=4)
    lists = drawn_lists(seed, clips, 2, cubes, share)
    mask = None
    if masked:
        shape = (clips, 1, 1, len(cubes.order)) if masked == "keys" else (1, 2, len(cubes.order), len(cubes.order))
        mask = torch.rand(shape) < 0.7 if masked == "keys" else torch.randn(shape)
    single = [x.requires_grad_() for x in heads_of(cubes, clips, 2, *sizes)]
    double = [x.detach().double().requires_grad_() for x in single]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathered_attention, "PIECE", piece)
        out = sparse_attention(*single, lists, cubes, mask=mask)
        truth = dense(
            *double, visible(lists, cubes), mask if mask is None or mask.dtype == torch.bool else mask.double()
        )
        grad = torch.randn_like(out)
        grads = torch.autograd.grad(out, single, grad)
    torch.testing.assert_close(out.double(), truth, rtol=1e-5, atol=1e-5)
    for mine, exact in zip(grads, torch.autograd.grad(truth, double, grad.double()), strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=1e-5)


def test_full_lists_equal_dense_attention_to_1e_6_and_its_gradients_to_1e_5() -> None:
    torch.manual_seed(0)
    cubes = token_cubes((5, 12, 10))
    query, key, value = (torch.randn(1, 2, 600, 64, requires_grad=True) for _ in range(3))
    lists = full_lists(1, 2, len(cubes.groups) - 1, len(cubes.blocks) - 1)
    out, truth = sparse_attention(query, key, value, lists, cubes), F.scaled_dot_product_attention(query, key, value)
    assert (out - truth).abs().max() <= 1e-6 * truth.abs().max()
    grad = torch.randn_like(out)
    for mine, theirs in zip(*(torch.autograd.grad(x, (query, key, value), grad) for x in (out, truth)), strict=True):
        assert (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_bf16_is_right_to_its_own_rounding_and_twice_the_same() -> None:
    torch.manual_seed(0)
    cubes = token_cubes((3, 10, 10), captions=5, queries=64, keys=16)
    lists = drawn_lists(0, 1, 2, cubes, 0.4)
    heads = [x.bfloat16().requires_grad_() for x in heads_of(cubes, 1, 2, 128, 128)]
    exact = [x.detach().double().requires_grad_() for x in heads]
    out, again = sparse_attention(*heads, lists, cubes), sparse_attention(*heads, lists, cubes)
    truth = dense(*exact, visible(lists, cubes), None)
    assert (out - truth).abs().max() <= 1.6e-2 * truth.abs().max()
    grad = torch.randn_like(out)
    grads, repeated = (torch.autograd.grad(x, heads, grad) for x in (out, again))
    for mine, other, true in zip(grads, repeated, torch.autograd.grad(truth, exact, grad.double()), strict=True):
        assert torch.equal(mine, other)
        assert (mine - true).abs().max() <= 2e-2 * true.abs().max()


def test_the_operators_keep_pytorch_s_rules() -> None:
    cubes = token_cubes((2, 3, 3), captions=2, queries=8, keys=4, cell=2)
    lists = drawn_lists(3, 1, 2, cubes, 0.5)
    heads = [x.requires_grad_() for x in heads_of(cubes, 1, 2, 16, 16)]
    arguments = (*heads, None, lists.indices, lists.counts, cubes.order, cubes.groups, cubes.blocks, 0.25)
    torch.library.opcheck(torch.ops.arachnec.sparse_attention.default, arguments)


@pytest.mark.parametrize(
    ("indices", "counts", "message"),
    [
        ([0, 1], [[[1, 1], [0, 1]]], "add up to 3 blocks, and 2"),
        ([0, 1, 5], [[[2, 1], [0, 0]]], "name block 5"),
        ([0, 1, 1], [[[1, 0], [2, 0]]], "clip 0, head 1, group 0 repeats a block"),
        ([0], [[[1]]], "1 x 1 x 1, where there are 1 clips x 2 heads x 2 groups"),
    ],
)
def test_lists_that_are_wrong_are_refused_by_name(
    indices: list[int], counts: list[list[list[int]]], message: str
) -> None:
    lists = KeyLists(torch.tensor(indices, dtype=torch.int32), torch.tensor(counts, dtype=torch.int32))
    with pytest.raises(ValueError, match=message):
        checked_lists(lists, 1, 2, 2, 4)


def test_heads_of_other_sizes_are_refused() -> None:
    cubes = token_cubes((1, 4, 4), queries=8, keys=8)
    with pytest.raises(ValueError, match="heads of 16 queries and keys"):
        sparse_attention(*(torch.randn(1, 1, 15, 8) for _ in range(3)), full_lists(1, 1, 2, 2), cubes)
