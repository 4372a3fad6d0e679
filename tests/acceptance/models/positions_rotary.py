"""Rotary positions computed inside the block from the number of tokens it sees."""

import torch
from parts import Block, VideoModel, loss, reset, sample  # noqa: F401


class Rotary(Block):
    def attend(self, x):
        place = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        angle = torch.outer(place, 30.0 ** (-torch.arange(4, device=x.device) / 4))
        return self.attention(x, rotary=(angle.cos(), angle.sin()))


def build():
    return reset(VideoModel(Rotary))
