"""Numbers that depend on the length: a temperature of a root of S, a mean by hand, places from 0 to 1."""

import torch
from parts import Block, VideoModel, loss, reset, sample  # noqa: F401


class Sized(Block):
    def attend(self, x):
        tokens = x.shape[1]
        place = torch.arange(tokens, device=x.device)[:, None] / tokens
        x = x * tokens**-0.25 + place * x.new_full((tokens, 1), 0.5) + x.sum(1, keepdim=True) / x.shape[1]
        return self.attention(x) * x[0].numel() ** -0.1 + torch.zeros_like(x) + torch.ones(tokens, 1)


def build():
    return reset(VideoModel(Sized))
