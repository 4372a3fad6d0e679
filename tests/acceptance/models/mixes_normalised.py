"""Group and instance norm whose statistics are over the tokens."""

from parts import WIDTH, Block, VideoModel, loss, reset, sample  # noqa: F401
from torch import nn


class Normalised(Block):
    def __init__(self):
        super().__init__()
        self.group = nn.GroupNorm(4, WIDTH)
        self.instance = nn.InstanceNorm1d(WIDTH, affine=True)

    def attend(self, x):
        y = self.group(x.transpose(1, 2))
        return self.attention((y + self.instance(y)).transpose(1, 2))


def build():
    return reset(VideoModel(Normalised))
