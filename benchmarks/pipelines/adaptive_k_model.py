"""Two equal blocks whose products take about as long as their tokens travel over a slow link.

Nothing outside of the blocks costs anything, so that two stages of one block are equal.
"""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, INNER, TOKENS = 64, 6144, 512


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, INNER)
        self.out = nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return x + self.out(F.relu(self.inner(x)))


class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def tokens(clip):
    return clip.frames * (clip.height // 8) * (clip.width // 8)


def build():
    return Narrow()


def sample(clip, generator):
    shape = (1, tokens(clip), WIDTH)
    return {"x": torch.randn(shape, generator=generator)}, torch.randn(shape, generator=generator)


def loss(prediction, target):
    return F.mse_loss(prediction, target)
