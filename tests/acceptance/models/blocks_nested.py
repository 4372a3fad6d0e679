"""Stages of a ModuleList of ModuleLists; blocks of two widths of MLP, a projection between the stages."""

from parts import WIDTH, Block, VideoModel, loss, reset, sample  # noqa: F401
from torch import nn


class Narrow(Block):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))


class Stage(nn.Module):
    def __init__(self, block):
        super().__init__()
        self.layers = nn.ModuleList([block(), block()])
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, text, time):
        for layer in self.layers:
            x = layer(x, text, time)
        return self.out(x)


class Model(VideoModel):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleList([Stage(Block)]), nn.ModuleList([Stage(Narrow)])])

    def run(self, x, text, time, grid):
        for stages in self.blocks:
            for stage in stages:
                x = stage(x, text, time)
        return x


def build():
    return reset(Model())
