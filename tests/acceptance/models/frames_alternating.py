"""Blocks over space, [B * F, H * W, D], and blocks over time, [B * H * W, F, D], in turn (Latte)."""

from parts import WIDTH, Attention, VideoModel, loss, mlp, reset, sample  # noqa: F401
from torch import nn


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = mlp()

    def forward(self, x):
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class Model(VideoModel):
    def __init__(self):
        super().__init__(Plain)
        self.over_time = nn.ModuleList([Plain(), Plain()])

    def run(self, x, text, time, grid):
        x = x + time[:, None] + self.blocks[0].norm(text).mean(1, keepdim=True)
        batch = x.shape[0]
        x = x.unflatten(1, (grid[0], -1))
        for space, over_time in zip(self.blocks, self.over_time, strict=True):
            x = space(x.flatten(0, 1)).unflatten(0, (batch, -1))
            x = over_time(x.transpose(1, 2).flatten(0, 1)).unflatten(0, (batch, -1)).transpose(1, 2)
        return x.flatten(1, 2)


def build():
    return reset(Model())
