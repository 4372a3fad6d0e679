"""Slices, gathers and process groups, and the rule of partial gradients."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from arachnec.kernels.attention.distributed_attention import distributed_attention
from arachnec.kernels.attention.exchange import Dealt, gather_tokens, redistribute, shard_tokens
from arachnec.kernels.attention.process_groups import ProcessGroups
from arachnec.kernels.attention.sequence_shard import SequenceShard
from arachnec.kernels.attention.subgroups import subgroups
from tests.distributed.attention_cases import process_groups
from tests.distributed.harness import run_ranks


def shard_of(tokens: tuple[int, ...]) -> SequenceShard:
    ranks = tuple(range(len(tokens)))
    groups = process_groups()
    groups.ensure(subgroups(ranks, 1, len(ranks)))
    return groups.shard(ranks, tokens, 1, len(ranks))


def slice_and_gather(tokens: tuple[int, ...], dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    shard = shard_of(tokens)
    shape = [2, 3, 4]
    shape[dim] = shard.total
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype).requires_grad_()
    mine = shard_tokens(x, dim, shard)
    whole = gather_tokens(mine, dim, shard)
    # Rank r's loss is (r + 1) * sum of squares: the slice collects the factors of all ranks.
    (grad,) = torch.autograd.grad((whole.square() * (dist.get_rank() + 1)).sum(), x)
    return x.detach(), whole.detach(), grad


@pytest.mark.parametrize("tokens", [(3, 3), (4, 0), (2, 5, 1), (0, 0, 3), (3, 3, 2, 2), (1, 0, 7, 0), (0, 0, 0, 0)])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_a_gather_undoes_a_slice_and_its_gradient_is_summed_over_ranks_and_sliced(
    tokens: tuple[int, ...], dim: int
) -> None:
    results = run_ranks(len(tokens), slice_and_gather, tokens, dim, torch.float64)
    factor = sum(range(1, len(tokens) + 1))
    start = 0
    for (x, whole, grad), local in zip(results, tokens, strict=True):
        assert torch.equal(whole, x)
        wanted = torch.zeros_like(x)
        wanted.narrow(dim, start, local).copy_(x.narrow(dim, start, local) * 2 * factor)
        torch.testing.assert_close(grad, wanted)
        start += local


def test_what_is_sent_in_bf16_arrives_and_is_summed_in_32_bits() -> None:
    for x, whole, grad in run_ranks(3, slice_and_gather, (2, 3, 1), 1, torch.bfloat16):
        assert torch.equal(whole, x) and grad.dtype == torch.bfloat16
    total = sum(grad for _, _, grad in run_ranks(3, slice_and_gather, (2, 3, 1), 1, torch.bfloat16))
    torch.testing.assert_close(total, x * 12, rtol=2**-8, atol=0.0)


def joint_layer(tokens: tuple[int, ...], grid: tuple[int, int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two joint attentions over video and text with shared weights; gradients of this rank, and of one process."""
    ranks = tuple(range(len(tokens)))
    groups = process_groups()
    groups.ensure(subgroups(ranks, *grid))
    shard = groups.shard(ranks, tokens, *grid)
    generator = torch.Generator().manual_seed(2)
    shapes = {"video": (1, shard.total, 12), "text": (1, 5, 12), "time": (12,), "weight": (12, 36)}
    values = {k: torch.randn(s, generator=generator, dtype=torch.float64) * 0.4 for k, s in shapes.items()}
    alone = SequenceShard((0,), 0, (shard.total,), 1, 1)
    gradients = []
    for where in (shard, alone):
        leaves = {k: v.clone().requires_grad_() for k, v in values.items()}
        video, text = shard_tokens(leaves["video"], 1, where), leaves["text"]
        for _ in range(2):
            tokens_ = torch.cat([video, text], 1) * (1 + leaves["time"])
            q, k, v = (tokens_ @ leaves["weight"]).view(1, -1, 3, 3, 4).permute(2, 0, 3, 1, 4)
            out = distributed_attention(q, k, v, where, query_parts=(None, 5), key_parts=(None, 5))
            video, text = (torch.cat([video, text], 1) + out.transpose(1, 2).flatten(2)).split([where.local, 5], 1)
        whole = torch.cat([gather_tokens(video, 1, where), text], 1)
        loss = whole.square().mean() / where.degree
        gradients.append(dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True)))
    return gradients[0], gradients[1]


@pytest.mark.parametrize(
    ("tokens", "grid"), [((4, 3), (2, 1)), ((5, 5, 5), (1, 3)), ((4, 4, 3, 0), (2, 2)), ((5, 5, 5, 4), (4, 1))]
)
def test_partial_gradients_of_replicated_values_sum_to_the_true_ones_through_several_layers(
    tokens: tuple[int, ...], grid: tuple[int, int]
) -> None:
    results = run_ranks(len(tokens), joint_layer, tokens, grid)
    for name, wanted in results[0][1].items():
        torch.testing.assert_close(sum(partial[name] for partial, _ in results), wanted, rtol=1e-10, atol=1e-12)


def groups_are_made_once() -> tuple[bool, str, str]:
    groups = ProcessGroups(timeout=timedelta(seconds=20))
    wanted = [(0, 1), (2, 1, 0), (3,), (0, 1)]
    groups.ensure(wanted)
    mine = [g for g in ((0, 1), (0, 1, 2)) if dist.get_rank() in g]
    before = [groups.get(g) for g in mine]
    groups.ensure(wanted)
    same = all(a is groups.get(g) for a, g in zip(before, mine, strict=True)) and groups.get((3,)) is None
    unknown = foreign = ""
    try:
        groups.get((1, 2))
    except KeyError as error:
        unknown = str(error)
    try:
        groups.get((0, 1))
    except ValueError as error:
        foreign = str(error)
    groups.close()
    return same, unknown, foreign


def test_groups_are_made_once_and_only_their_members_get_them() -> None:
    results = run_ranks(3, groups_are_made_once)
    assert all(same and "no group was made of ranks (1, 2)" in unknown for same, unknown, _ in results)
    assert [foreign for _, _, foreign in results] == ["", "", "rank 2 is not one of (0, 1)"]


ALONE = SequenceShard((0,), 0, (6,), 1, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_parts": (None, 2)}, r"query \(1, 4, 6, 8\) does not have the 8 local tokens of its parts"),
        ({"key": torch.zeros(1, 3, 6, 8), "value": torch.zeros(1, 3, 6, 8)}, "4 query heads cannot share 3 key"),
        ({"key": torch.zeros(1, 2, 6, 8), "value": torch.zeros(1, 2, 6, 8)}, "need enable_gqa"),
        ({"mask": torch.ones(1, 1, 6, 5, dtype=torch.bool)}, r"mask \(1, 1, 6, 5\) is not"),
        ({"mask": torch.ones(1, 1, 6, 6, dtype=torch.bool), "is_causal": True}, "exclude each other"),
        ({"mask": torch.zeros(1, 1, 6, 6, requires_grad=True)}, "a mask that wants a gradient"),
    ],
)
def test_what_does_not_fit_together_is_refused(changes: dict[str, object], message: str) -> None:
    x = torch.zeros(1, 4, 6, 8)
    arguments = {"query": x, "key": x, "value": x, "shard": ALONE, "query_parts": (None,), "key_parts": (None,)}
    with pytest.raises(ValueError, match=message):
        distributed_attention(**(arguments | changes))  # type: ignore[arg-type]


def test_tokens_that_are_not_there_are_not_sliced_or_gathered() -> None:
    with pytest.raises(ValueError, match="does not hold the 6 tokens"):
        shard_tokens(torch.zeros(2, 5), 1, ALONE)
    with pytest.raises(ValueError, match="does not hold this rank's 6 tokens"):
        gather_tokens(torch.zeros(2, 5), 1, ALONE)


def dealt_anew(before: Dealt, after: Dealt) -> tuple[Tensor, Tensor]:
    shard = shard_of(before.shares)
    whole = torch.arange(2 * before.size, dtype=torch.float64).view(2, -1)
    x = whole[:, before.held(shard.index)].clone().requires_grad_()
    moved = redistribute(x, 1, before, after, shard)
    assert torch.equal(moved, whole[:, after.held(shard.index)])
    (grad,) = torch.autograd.grad((moved * whole[:, after.held(shard.index)]).sum(), x)
    return x.detach(), grad


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Dealt(1, (7, 5), 1), Dealt(4, (2, 1), 1)),  # a sequence, then the places of four frames
        (Dealt(1, (2, 2, 0), 3), Dealt(4, (1, 1, 1), 1)),  # frames, then places
        (Dealt(2, (3, 1, 0, 2), 2), Dealt(1, (6, 6, 6, 6), 1)),  # rows of two clips, then all in one sequence
        (Dealt(3, (0, 0), 2), Dealt(1, (0, 0), 5)),  # nothing
    ],
)
def test_tokens_dealt_out_anew_are_all_there_and_their_gradients_go_back(before: Dealt, after: Dealt) -> None:
    for x, grad in run_ranks(len(before.shares), dealt_anew, before, after):
        assert torch.equal(grad, x)
