"""Long skips from the first half of the blocks to the second (U-ViT)."""

import torch
from parts import WIDTH, Block, VideoModel, loss, reset, sample  # noqa: F401
from torch import nn


class Skipped(Block):
    def __init__(self):
        super().__init__()
        self.skip = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, skip, text, time):
        return super().forward(self.skip(torch.cat([x, skip], dim=-1)), text, time)


class Model(VideoModel):
    def __init__(self):
        super().__init__(layers=2)
        self.middle = Block()
        self.up = nn.ModuleList([Skipped(), Skipped()])

    def run(self, x, text, time, grid):
        skips = []
        for block in self.blocks:
            x = block(x, text, time)
            skips.append(x)
        x = self.middle(x, text, time)
        for block in self.up:
            x = block(x, skips.pop(), text, time)
        return x


def build():
    return reset(Model())
