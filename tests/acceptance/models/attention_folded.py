"""Attention of three dimensions: heads folded into the batch."""

import torch.nn.functional as F
from parts import HEADS, Block, VideoModel, loss, reset, sample  # noqa: F401


class Folded(Block):
    def attend(self, x):
        batch, tokens, width = x.shape

        def fold(y):
            return y.reshape(batch, tokens, HEADS, -1).permute(0, 2, 1, 3).reshape(batch * HEADS, tokens, -1)

        k, v = self.attention.kv(x).chunk(2, dim=-1)
        y = F.scaled_dot_product_attention(fold(self.attention.q(x)), fold(k), fold(v))
        y = y.reshape(batch, HEADS, tokens, -1).permute(0, 2, 1, 3).reshape(batch, tokens, width)
        return self.attention.out(y)


def build():
    return reset(VideoModel(Folded))
