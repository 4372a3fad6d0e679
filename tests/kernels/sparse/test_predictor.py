"""The predictor's loss and measurements by brute force, and the path that is taken."""

import pytest
import torch
import torch.nn.functional as F

from arachnec.kernels.sparse import predictor
from arachnec.kernels.sparse.key_lists import chosen_blocks, full_lists
from arachnec.kernels.sparse.predictor import (
    block_mass,
    cell_features,
    held_mass,
    initial_projections,
    measured_sparsity,
    moved,
    needed_blocks,
    predicted_scores,
    score_loss,
    true_scores,
    turns_sparse,
)
from arachnec.kernels.sparse.token_cubes import token_cubes
from arachnec.kernels.sparse.video_attention import predicted_lists, video_attention


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_the_loss_of_the_true_scores_is_zero_and_weighs_angle_and_length() -> None:
    true = torch.randn(2, 3, 4, 50, generator=rng())
    torch.testing.assert_close(score_loss(true, true).mean((0, 2)), torch.zeros(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(score_loss(2 * true, true).mean((0, 2)), torch.full((3,), 0.05), atol=1e-6, rtol=0)
    torch.testing.assert_close(score_loss(-true, true).mean((0, 2)), torch.full((3,), 1.9), atol=1e-6, rtol=0)


@pytest.mark.parametrize("grid", [(4, 8, 8), (3, 5, 7)])
def test_features_of_a_cell_are_its_projected_mean(grid: tuple[int, int, int]) -> None:
    cubes = token_cubes(grid, captions=3)
    source = torch.randn(2, 1, len(cubes.order), 12, generator=rng())
    by = initial_projections(4, 12, 12, 5, rng())
    features = cell_features(source, by.query, cubes)
    cells = source[:, :, : cubes.video].split(cubes.cells.diff().tolist(), 2)
    torch.testing.assert_close(features, torch.stack([cell.mean(2) for cell in cells], 2) @ by.query)


def test_features_are_the_same_some_heads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    cubes = token_cubes((3, 5, 7))
    source, by = torch.randn(2, 3, 105, 12, generator=rng()), initial_projections(3, 12, 12, 5, rng())
    at_once = cell_features(source, by.query, cubes)
    monkeypatch.setattr(predictor, "NUMBERS", 1)
    assert torch.equal(cell_features(source, by.query, cubes), at_once)


def test_sparsity_counts_the_keys_outside_the_fewest_that_hold_the_mass() -> None:
    mass = torch.tensor([0.5, 0.3, 0.15, 0.05])
    assert measured_sparsity(mass.log()[None, None, None]).item() == 0.25
    assert measured_sparsity(mass.log()[None, None, None], 0.79).item() == 0.5
    assert measured_sparsity(torch.zeros(1, 2, 3, 10)).mean((0, 2)).tolist() == pytest.approx([0.1, 0.1])
    assert moved([0.5], [1.0]) == pytest.approx((0.55,))
    assert moved([1.0], [1.0 + 2**-23]) == (1.0,)  # as a mean of ranks may be


def test_the_mass_that_chosen_blocks_hold_is_compared_with_the_best_choice_of_that_size() -> None:
    scores = torch.tensor([0.4, 0.1, 0.2, 0.1, 0.1, 0.1]).log()[None, None, None]
    blocks = torch.tensor([0, 2, 4, 6])
    held, ratio = held_mass(block_mass(scores, blocks), torch.tensor([[[False, True, False]]]))
    assert (held.item(), ratio.item()) == (pytest.approx(0.3), pytest.approx(0.6))
    held, ratio = held_mass(block_mass(scores, blocks), torch.zeros(1, 1, 3, dtype=torch.bool))
    assert (held.item(), ratio.item()) == (0.0, 1.0)
    assert needed_blocks(block_mass(scores, blocks)).item() == 1.0
    assert needed_blocks(block_mass(scores, blocks), 0.75).item() == pytest.approx(2 / 3)
    assert turns_sparse(0.009, 0.97) and not turns_sparse(0.01, 0.99) and not turns_sparse(0.001, 0.96)


def test_a_trained_predictor_of_low_rank_heads_finds_their_blocks() -> None:
    """Queries and keys of rank 4 in heads of 16: the prediction becomes exact, the choice the best there is."""
    torch.manual_seed(0)
    cubes = token_cubes((4, 8, 8), queries=32, keys=16, cell=4)
    cell = torch.repeat_interleave(torch.arange(64), 4)[cubes.places]
    query, key = (torch.randn(1, 2, 64, 4)[:, :, cell] @ torch.randn(2, 4, 16) for _ in range(2))
    by = initial_projections(2, 16, 16, 8, rng())
    parameters = [by.query.requires_grad_(), by.key.requires_grad_()]
    optimizer = torch.optim.Adam(parameters, lr=0.05)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 400)
    true = true_scores(query, key, 0.25)
    for step in range(400):
        rows = slice(step % 8, None, 8)
        loss = score_loss(predicted_scores(query[:, :, rows], key, by), true[:, :, rows]).mean((0, 2))
        optimizer.zero_grad()
        loss.sum().backward()
        optimizer.step()
        schedule.step()
    assert loss.max() < 0.01
    lists = predicted_lists(query, key, by, cubes, [4, 4])
    chosen = chosen_blocks(lists, 16)
    for group, rows in enumerate(cubes.order.split(cubes.groups.diff().tolist())):
        _, ratio = held_mass(block_mass(true[:, :, rows][..., cubes.order], cubes.blocks), chosen[:, :, group])
        assert ratio.min() >= 0.97


def test_full_lists_and_none_are_bitwise_the_dense_path() -> None:
    cubes = token_cubes((2, 5, 6), captions=4)
    heads = [torch.randn(1, 2, 64, 16, requires_grad=True) for _ in range(3)]
    truth = F.scaled_dot_product_attention(*heads)
    for lists in (None, full_lists(1, 2, len(cubes.groups) - 1, len(cubes.blocks) - 1)):
        out = video_attention(*heads, cubes, lists)
        assert torch.equal(out, truth)
        for mine, theirs in zip(
            *(torch.autograd.grad(x.sum(), heads, retain_graph=True) for x in (out, truth)), strict=True
        ):
            assert torch.equal(mine, theirs)
