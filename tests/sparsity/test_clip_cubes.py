"""Groups and blocks of a clip: the cubes of its grid, as the kernels cut it."""

from __future__ import annotations

import pytest

from arachnec.ir.nodes import Clip, Stage
from arachnec.ir.values import Attributes, Value
from arachnec.kernels.sparse.token_cubes import token_cubes
from arachnec.sparsity.clip_grid import caption_blocks, clip_cubes

CLIP = Clip(0, 5, 16, 16, 0, 1000)


def stage(**said: Value) -> Stage:
    return Stage("dit", True, Attributes.of(**said))


@pytest.mark.parametrize(
    ("said", "clip", "counts"),
    [
        ({"query_group": 100}, CLIP, (10, 1)),
        ({"query_group": 300}, CLIP, (4, 1)),
        ({"key_block": 64}, CLIP, (1, 16)),
        ({}, CLIP, (1, 1)),
        ({"query_group": 100, "key_block": 64}, None, (10, 16)),
    ],
)
def test_without_a_grid_and_both_sizes_cubes_are_counted_from_tokens(
    said: dict[str, Value], clip: Clip | None, counts: tuple[int, int]
) -> None:
    assert clip_cubes(stage(**said), 1000, clip) == counts


@pytest.mark.parametrize("sizes", [(64, 64), (256, 64), (32, 128)])
def test_cubes_are_those_of_the_kernels_where_both_sizes_are_said(sizes: tuple[int, int]) -> None:
    """5 x 10 x 20 tokens: more cubes than tokens by size, as none is full."""
    queries, keys = sizes
    cubes = token_cubes((5, 10, 20), queries=queries, keys=keys)
    counted = clip_cubes(stage(query_group=queries, key_block=keys), 1000, Clip(0, 17, 80, 160, 0, 1000))
    assert counted == (len(cubes.groups) - 1, len(cubes.blocks) - 1)
    assert counted[0] >= -(-1000 // queries) and counted[1] >= -(-1000 // keys) and sum(counted) > 1000 / 64


def test_captions_have_blocks_of_their_own() -> None:
    assert caption_blocks(stage(key_block=64), 512) == 0
    assert caption_blocks(stage(key_block=64, caption_tokens=(1, 0)), 65) == 2
    assert caption_blocks(stage(key_block=64, caption_tokens=(0, 256)), 65) == 4
