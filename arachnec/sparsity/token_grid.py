"""The grid in which a clip's tokens stand, from their number and the clip's size in pixels."""

from __future__ import annotations

import itertools

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
