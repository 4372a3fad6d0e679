"""A convolution along the tokens in time order inside the block."""

from parts import WIDTH, Block, VideoModel, loss, reset, sample  # noqa: F401
from torch import nn


class Convolved(Block):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=3)

    def attend(self, x):
        return self.attention(x) + self.conv(x.transpose(1, 2)).transpose(1, 2)


def build():
    return reset(VideoModel(Convolved))
