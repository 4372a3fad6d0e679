"""The model of the benchmarks against pipelines and FSDP2 of torch: plain transformer blocks, one stream."""

from __future__ import annotations

import torch
from torch import nn

WIDTH, HEADS = 192, 4
BLOCKS, CHANNELS = 8, 16


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        b, s, c = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, s, 3, self.heads, c // self.heads).unbind(2)
        y = nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        x = x + self.out(y.transpose(1, 2).reshape(b, s, c))
        return x + self.mlp(x)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(CHANNELS, WIDTH)
        self.blocks = nn.ModuleList([Block(WIDTH, HEADS) for _ in range(BLOCKS)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CHANNELS)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def build():
    return Blocks()


def sample(clip, generator):
    """A clip of n frames of 16 x 16 has n tokens."""
    tokens = clip.frames * (clip.height // 16) * (clip.width // 16)
    noise = torch.randn(1, tokens, CHANNELS, generator=generator)
    return {"x": torch.ones(1, tokens, CHANNELS) + noise}, noise


def loss(prediction, target):
    return nn.functional.mse_loss(prediction, target)
