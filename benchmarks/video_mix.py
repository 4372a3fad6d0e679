"""Sequence lengths of the bucketed video mix: 35 % images, 25 % clips at 256p, 30 % at 480p, 10 % at 720p."""

from __future__ import annotations

import random

FRAMES = (17, 33, 49, 65, 81, 97, 121)


def tokens(rng: random.Random) -> int:
    u = rng.random()
    if u < 0.35:
        return rng.choice((1024, 1560, 3600))
    latent = (rng.choice(FRAMES) - 1) // 4 + 1
    return latent * (400 if u < 0.60 else 1560 if u < 0.90 else 3600)
