"""A class token that travels beside the video, joined to it in every block."""

import torch
from parts import WIDTH, Block, VideoModel, loss, reset, sample  # noqa: F401
from torch import nn


class Classed(Block):
    def forward(self, x, token, text, time):
        joined = super().forward(torch.cat([token, x], dim=1), text, time)
        return joined[:, 1:], joined[:, :1]


class Model(VideoModel):
    def __init__(self):
        super().__init__(Classed)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))

    def run(self, x, text, time, grid):
        token = self.token.expand(x.shape[0], -1, -1)
        for block in self.blocks:
            x, token = block(x, token, text, time)
        return x + token


def build():
    return reset(Model())
