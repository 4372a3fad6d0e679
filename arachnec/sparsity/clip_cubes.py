"""How many groups of queries and blocks of keys a clip has, by what its stage says and the clip's size in pixels."""

from __future__ import annotations

import math

from arachnec.ir.head_density import group_count
from arachnec.ir.nodes import Clip, Stage, integers
from arachnec.ir.stage_sizes import count_in
from arachnec.kernels.sparse.cube_sides import cube_counts
from arachnec.sparsity.token_grid import token_grid


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
