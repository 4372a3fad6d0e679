"""Blocks that take the video as [B, F, H, W, D] and flatten it themselves."""

from parts import Block, VideoModel, loss, reset, sample  # noqa: F401


class Grid(Block):
    def forward(self, x, text, time):
        return super().forward(x.flatten(1, 3), text, time).view(x.shape)


class Model(VideoModel):
    def run(self, x, text, time, grid):
        return super().run(x.unflatten(1, grid), text, time, grid).flatten(1, 3)


def build():
    return reset(Model(Grid))
