"""The grid in which a clip's tokens stand, and the cubes it is cut into: groups of queries, blocks of keys."""

from __future__ import annotations

import itertools
import math

from arachnec.ir.head_density import group_count
from arachnec.ir.nodes import Clip, Stage, integers
from arachnec.ir.stage_sizes import count_in
from arachnec.kernels.sparse.cube_sides import cube_counts

Grid = tuple[int, int, int]  # frames, height, width, in tokens

PATCHES = (1, 2, 4, 8, 14, 16, 32, 64, 128)  # pixels a side that a token may stand for, VAE and patch together


def token_grid(tokens: int, frames: int, height: int, width: int) -> Grid:
    """Frames x height x width of ``tokens`` tokens in raster order, with the clip's own proportions.

    Latent frames are at most the frames. Where several grids fit, one of a causal VAE comes first, which makes one
    latent frame of the first frame and one of every few others; then the one of the smallest patches. Where none fits,
    all tokens stand in one row: a grid decides which tokens are neighbours, never what is right.
    """
    fitting = []
    for size in PATCHES:
        sides = ({length // size, -(-length // size)} - {0} for length in (height, width))
        for down, across in itertools.product(*sides):
            latent, rest = divmod(tokens, down * across)
            if rest == 0 and 1 <= latent <= frames:
                causal = latent == 1 or (frames - 1) % (latent - 1) == 0
                fitting.append((not causal, size, (latent, down, across)))
    return min(fitting)[2] if fitting else (1, 1, tokens)


def clip_cubes(stage: Stage, tokens: int, clip: Clip | None) -> tuple[int, int]:
    """Groups, and blocks of video: the cubes of the clip's grid, as the kernels cut it. Without a clip the tokens stand
    in one row."""
    queries, keys = count_in(stage, "query_group"), count_in(stage, "key_block")
    if clip is None or not queries or not keys:
        return group_count(stage, tokens), math.ceil(tokens / (keys or tokens or 1)) or 1
    return cube_counts(token_grid(tokens, clip.frames, clip.height, clip.width), queries, keys)


def caption_blocks(stage: Stage, text: int) -> int:
    """Blocks of captions that stand beside a clip's tokens in a sequence of its own, for so many text tokens."""
    of_text, beside = integers(stage.attrs.get("caption_tokens", (0, 0)))
    return math.ceil((of_text * text + beside) / (count_in(stage, "key_block") or 1))
