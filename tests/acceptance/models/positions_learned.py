"""Learned absolute positions: a table in the shell and another in every block, cut to the clip's length."""

import torch
from parts import WIDTH, Block, VideoModel, loss, reset, sample  # noqa: F401
from torch import nn


class Placed(Block):
    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(1, 2048, WIDTH) * 0.1)

    def forward(self, x, text, time):
        return super().forward(x + self.position[:, : x.shape[1]], text, time)


class Model(VideoModel):
    def __init__(self):
        super().__init__(Placed)
        self.position = nn.Embedding(2048, WIDTH)

    def run(self, x, text, time, grid):
        return super().run(x + self.position(torch.arange(x.shape[1], device=x.device)), text, time, grid)


def build():
    return reset(Model())
