"""A frozen model with LoRA on the queries, one trained norm, and a trained head."""

import torch
from parts import WIDTH, Block, VideoModel, loss, reset, sample  # noqa: F401
from torch import nn


class Lora(nn.Module):
    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, WIDTH))
        self.up = nn.Parameter(torch.randn(WIDTH, rank))

    def forward(self, x):
        return self.base(x) + (x @ self.down.T) @ self.up.T


def build():
    model = reset(VideoModel(Block, layers=3)).requires_grad_(False)
    for block in model.blocks[1:]:
        block.attention.q = Lora(block.attention.q)
    model.blocks[2].norm3.requires_grad_(True)
    model.head.weight.requires_grad_(True)
    return model
