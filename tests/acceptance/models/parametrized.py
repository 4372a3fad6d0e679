"""Weight norm, PReLU, an attention without bias, and autocast switched off around a norm."""

import torch
from parts import WIDTH, Block, VideoModel, loss, reset, sample  # noqa: F401
from torch import nn


class Parametrized(Block):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
            nn.PReLU(),
            nn.Linear(WIDTH, WIDTH, bias=False),
        )

    def attend(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.attention(x.float())


def build():
    return reset(VideoModel(Parametrized))
