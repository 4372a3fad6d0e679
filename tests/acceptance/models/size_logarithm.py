"""A temperature of log S by the math module."""

import math

from parts import Block, VideoModel, loss, reset, sample  # noqa: F401


class Sized(Block):
    def attend(self, x):
        return self.attention(x * math.log(x.shape[1]))


def build():
    return reset(VideoModel(Sized))
