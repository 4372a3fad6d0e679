"""The model of the jobs that faults are injected into: two blocks, steps of milliseconds."""

BLOCKS = """
import time
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.tanh(self.mix(x))


class Small(nn.Module):
    def __init__(self, seconds=0.0):
        super().__init__()
        self.seconds = seconds
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x):
        time.sleep(self.seconds)
        for block in self.blocks:
            x = block(x)
        return x


def noise_of(clip, generator):
    return torch.randn(1, clip.frames * (clip.height // 8) * (clip.width // 8), 16, generator=generator)


def loss(prediction, target):
    return nn.functional.mse_loss(prediction, target)
"""
