"""A transformer of plain blocks, conditioned on time: what some models of the benchmarks have in common."""

import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x, time):
        h = self.norm(x) * (1 + time[:, None])
        q, k, v = self.qkv(h).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class PlainTransformer(nn.Module):
    def __init__(self, channels, width, heads, layers):
        super().__init__()
        self.embed = nn.Linear(channels, width)
        self.time = nn.Linear(1, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.head = nn.Linear(width, channels)

    def forward(self, x, t):
        time = self.time(t[:, None])
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, time)
        return self.head(x)
