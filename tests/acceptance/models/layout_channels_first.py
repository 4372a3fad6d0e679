"""Channels before the tokens, [B, D, S], pointwise convolutions for linear layers."""

from parts import WIDTH, Block, VideoModel, loss, reset, sample  # noqa: F401
from torch import nn


class ChannelsFirst(Block):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Conv1d(WIDTH, 2 * WIDTH, 1), nn.GELU(), nn.Conv1d(2 * WIDTH, WIDTH, 1))

    def forward(self, x, text, time):
        y = self.norm1(x.mT) + time[:, None]
        x = x + self.attend(y).mT
        return x + self.mlp(x)


class Model(VideoModel):
    def run(self, x, text, time, grid):
        return super().run(x.transpose(1, 2), text, time, grid).transpose(1, 2)


def build():
    return reset(Model(ChannelsFirst))
