"""Blocks that take clips and tokens as one dimension, [B * S, D], and the number of clips."""

from parts import Block, VideoModel, loss, reset, sample  # noqa: F401


class Flat(Block):
    def forward(self, x, text, time):
        return super().forward(x.unflatten(0, (text.shape[0], -1)), text, time).flatten(0, 1)


class Model(VideoModel):
    def run(self, x, text, time, grid):
        return super().run(x.flatten(0, 1), text, time, grid).unflatten(0, (text.shape[0], -1))


def build():
    return reset(Model(Flat))
