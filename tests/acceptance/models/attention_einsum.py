"""Attention by einsum, heads never transposed."""

import torch
from parts import HEADS, Block, VideoModel, loss, reset, sample  # noqa: F401


class Einsum(Block):
    def attend(self, x):
        q = self.attention.q(x).unflatten(-1, (HEADS, -1))
        k, v = (y.unflatten(-1, (HEADS, -1)) for y in self.attention.kv(x).chunk(2, dim=-1))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        return self.attention.out(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(2))


def build():
    return reset(VideoModel(Einsum))
