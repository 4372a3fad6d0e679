"""Cubes hold neighbours and every token once; lists are the best blocks by predicted mass."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.kernels.attention.divided_heads import HeadShare
from arachnec.kernels.sparse import critical_keys as module
from arachnec.kernels.sparse.critical_keys import critical_keys
from arachnec.kernels.sparse.cube_sides import group_count
from arachnec.kernels.sparse.key_lists import KeyLists, checked_lists, chosen_blocks
from arachnec.kernels.sparse.predictor import (
    Projections,
    block_mass,
    cell_features,
    held_mass,
    kept_blocks,
    needed_blocks,
    true_scores,
)
from arachnec.kernels.sparse.sparse_attention import lists_of
from arachnec.kernels.sparse.token_cubes import token_cubes

GRIDS = st.tuples(st.integers(1, 6), st.integers(1, 14), st.integers(1, 14))


@settings(max_examples=20, deadline=None)
@given(grid=GRIDS, captions=st.integers(0, 20), first=st.booleans(), sizes=st.sampled_from([(64, 16, 4), (8, 64, 8)]))
def test_cubes_hold_every_token_once_and_neighbours_only(
    grid: tuple[int, int, int], captions: int, first: bool, sizes: tuple[int, int, int]
) -> None:
    cubes = token_cubes(grid, captions=captions, captions_first=first, queries=sizes[0], keys=sizes[1], cell=sizes[2])
    video = grid[0] * grid[1] * grid[2]
    assert sorted(cubes.order.tolist()) == list(range(video + captions))
    assert cubes.order[cubes.places].tolist() == list(range(video + captions))
    shift = captions if first else 0
    place = torch.stack(torch.unravel_index(cubes.order[:video] - shift, grid))
    assert place.min() >= 0
    for starts, size in zip(
        (cubes.groups, cubes.blocks[: len(cubes.blocks) - cubes.captions], cubes.cells), sizes, strict=True
    ):
        assert starts[0] == 0 and starts[-1] == video
        for low, high in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            extent = place[:, low:high].amax(1) - place[:, low:high].amin(1) + 1
            assert extent.prod() == high - low <= size
    assert set(cubes.groups.tolist()) | set(cubes.blocks.tolist()[: -cubes.captions or None]) <= set(
        cubes.cells.tolist()
    )
    assert cubes.blocks[-1] == video + captions


@settings(max_examples=10, deadline=None)
@given(grid=GRIDS, seed=st.integers(0, 99), captions=st.integers(0, 9), strip=st.sampled_from([1, 1 << 21]))
def test_the_lists_are_the_blocks_of_most_predicted_mass(
    grid: tuple[int, int, int], seed: int, captions: int, strip: int
) -> None:
    torch.manual_seed(seed)
    cubes = token_cubes(grid, captions=captions, queries=16, keys=8, cell=2)
    cells, blocks = len(cubes.cells) - 1, len(cubes.blocks) - 1 - cubes.captions
    query, key = torch.randn(2, 2, cells, 3), torch.randn(2, 2, cells, 3)
    kept = [seed % (blocks + 1), blocks // 2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "STRIP", strip)
        lists = critical_keys(query, key, cubes, kept)
    checked_lists(lists, 2, 2, len(cubes.groups) - 1, blocks + cubes.captions)
    chosen = chosen_blocks(lists, blocks + cubes.captions)
    assert chosen[..., blocks:].all()
    # token by token: a cell's features stand for each of its tokens
    tokens = cubes.cells.diff()
    wide = [torch.repeat_interleave(x, tokens, 2).double() for x in (query, key)]
    weights = (wide[0] @ wide[1].mT).softmax(-1)
    of_block = torch.stack([part.sum(-1) for part in weights.split(cubes.blocks.diff()[:blocks].tolist(), 3)], -1)
    mass = torch.stack([part.sum(2) for part in of_block.split(cubes.groups.diff().tolist(), 2)], 2)
    for head, keep in enumerate(kept):
        assert (chosen[:, head, :, :blocks].sum(-1) == keep).all()
        best = mass[:, head].sort(-1, descending=True).values[..., :keep].sum(-1)
        taken = (mass[:, head] * chosen[:, head, :, :blocks]).sum(-1)
        torch.testing.assert_close(taken, best, rtol=1e-5, atol=1e-9)


def test_a_head_keeps_one_block_at_least_and_all_at_most() -> None:
    assert kept_blocks((1e-12, 0.1, 0.35, 1.0), 20) == [1, 2, 7, 20]


def test_ties_go_to_the_lower_index() -> None:
    cubes = token_cubes((1, 8, 8), queries=16, keys=8, cell=4)
    flat = torch.ones(1, 1, 16, 4)
    lists = critical_keys(flat, flat, cubes, [3])
    assert lists.indices.view(-1, 3).unique(dim=0).tolist() == [[0, 1, 2]]


def test_the_operator_keeps_pytorch_s_rules() -> None:
    cubes = token_cubes((2, 4, 4), captions=3, queries=8, keys=4, cell=2)
    query = torch.randn(1, 2, 16, 4)
    arguments = (
        query,
        query,
        cubes.group_cells,
        cubes.block_cells,
        cubes.cells.diff(),
        [1, 3],
        [0, 4, 1, 2],
        cubes.captions,
    )
    torch.library.opcheck(torch.ops.arachnec.critical_keys.default, arguments)


def test_what_cannot_be_chosen_from_is_refused() -> None:
    cubes = token_cubes((1, 4, 4), queries=8, keys=4, cell=2)
    features = torch.randn(1, 2, 8, 4)
    with pytest.raises(ValueError, match="each of 2 heads keeps 0 to 4 blocks"):
        critical_keys(features, features, cubes, [5, 1])
    with pytest.raises(ValueError, match="features of 8 cells"):
        critical_keys(features[:, :, :7], features[:, :, :7], cubes, [1, 1])
    with pytest.raises(ValueError, match="not finite"):
        critical_keys(features, features * torch.inf, cubes, [1, 1])
    with pytest.raises(ValueError, match="0 x 4 x 4 tokens"):
        token_cubes((0, 4, 4))
    with pytest.raises(ValueError, match="cells of 8 tokens"):
        token_cubes((1, 4, 4), queries=4)


@given(st.tuples(st.integers(1, 9), st.integers(1, 12), st.integers(1, 12)), st.integers(8, 300), st.integers(8, 300))
@settings(max_examples=60, deadline=None)
def test_groups_are_counted_without_their_tokens(grid: tuple[int, int, int], queries: int, keys: int) -> None:
    """A plan counts them before there is a tensor."""
    assert group_count(grid, queries, keys) == len(token_cubes(grid, queries=queries, keys=keys).groups) - 1


@pytest.mark.parametrize("grid", [(2, 4, 8), (1, 5, 7)])
def test_no_host_waits_for_a_device_to_predict_choose_or_list(grid: tuple[int, int, int]) -> None:
    """On the device `meta` no value can be read back and no size can follow from one: either raises."""
    cubes = token_cubes(grid, captions=3, queries=16, keys=4, cell=2)
    total, blocks, groups = len(cubes.order), len(cubes.blocks) - 1, len(cubes.groups) - 1
    features = torch.empty(2, 2, total, 8, device="meta")
    by = Projections(*(torch.empty(2, 8, 4, device="meta") for _ in "qk"))
    cells = [cell_features(features, projection, cubes) for projection in (by.query, by.key)]
    starts = (cubes.group_cells, cubes.block_cells, cubes.cells.diff())
    indices, counts = module.best_blocks(*cells, *starts, [1, 3], [0, groups, 0, groups], cubes.captions)
    lists = KeyLists(indices, counts)
    assert len(indices) == 2 * groups * (1 + 3 + 2 * cubes.captions) and counts.shape == (2, 2, groups)
    chosen = chosen_blocks(lists, blocks)[:, :, 0, : blocks - cubes.captions]
    scores = true_scores(features[:, :, :5], features[:, :, : cubes.video], 0.5)
    video = cubes.blocks[: blocks - cubes.captions + 1]
    of_block = block_mass(scores, video)
    assert held_mass(of_block, chosen)[0].shape == needed_blocks(of_block).shape == (2, 2)
    launch = lists_of(indices, counts, cubes.order.to("meta"), cubes.groups, cubes.blocks)
    assert launch.query_slots(8)[1] == launch.key_slots(2)[1] == 2
    assert len(launch.indices) == len(launch.readers()[0]) == len(indices) + 4 * blocks


def test_lists_of_some_groups_are_those_of_all_groups_there() -> None:
    cubes = token_cubes((2, 8, 8), captions=3, queries=16, keys=8, cell=4)
    torch.manual_seed(0)
    query, key = torch.randn(2, 2, 3, 32, 4)
    every = critical_keys(query, key, cubes, [2, 5, 9])
    shares = (HeadShare(2, None, 3, 7), HeadShare(0), HeadShare(1, None, 0, 1))
    some = critical_keys(query[:, [2, 0, 1]], key[:, [2, 0, 1]], cubes, [9, 2, 5], [(3, 7), (0, 8), (0, 1)])
    given = every.of_shares(shares, torch.device("cpu"))
    assert torch.equal(some.indices, given.indices) and torch.equal(some.counts, given.counts)
    assert some.counts[:, 0, :3].sum() == some.counts[:, 2, 1:].sum() == 0
