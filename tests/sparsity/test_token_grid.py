"""The grid of a clip's tokens is that of the models that make them."""

import pytest

from arachnec.sparsity.clip_grid import token_grid


@pytest.mark.parametrize(
    ("tokens", "clip", "grid"),
    [
        (32760, (81, 480, 832), (21, 30, 52)),  # Wan 2.1
        (17550, (49, 480, 720), (13, 30, 45)),  # CogVideoX
        (118800, (129, 720, 1280), (33, 45, 80)),  # HunyuanVideo
        (1560, (1, 480, 832), (1, 30, 52)),
        (1, (1, 16, 16), (1, 1, 1)),
        (97, (5, 64, 64), (1, 1, 97)),  # nothing fits: one row
    ],
)
def test_the_grid_has_the_clip_s_proportions(
    tokens: int, clip: tuple[int, int, int], grid: tuple[int, int, int]
) -> None:
    assert token_grid(tokens, *clip) == grid
