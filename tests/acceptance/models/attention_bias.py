"""A learned bias on the scores, by the distance of two tokens (T5's relative positions): the mask has a gradient."""

import torch
from parts import Block, VideoModel, loss, reset, sample  # noqa: F401
from torch import nn


class Biased(Block):
    def __init__(self):
        super().__init__()
        self.bias = nn.Embedding(16, 3)

    def attend(self, x):
        place = torch.arange(x.shape[1], device=x.device)
        distance = (place[:, None] - place[None, :]).clamp(-8, 7) + 8
        return self.attention(x, mask=self.bias(distance).permute(2, 0, 1)[None])


def build():
    return reset(VideoModel(Biased))
