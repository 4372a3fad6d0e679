"""Six query heads over two key and value heads, by enable_gqa."""

import torch.nn.functional as F
from parts import WIDTH, Block, VideoModel, join_heads, loss, reset, sample, split_heads  # noqa: F401
from torch import nn


class Grouped(Block):
    def __init__(self):
        super().__init__()
        self.attention.kv = nn.Linear(WIDTH, 2 * 8)

    def attend(self, x):
        q = split_heads(self.attention.q(x), 6)
        k, v = (split_heads(y, 2) for y in self.attention.kv(x).chunk(2, dim=-1))
        return self.attention.out(join_heads(F.scaled_dot_product_attention(q, k, v, enable_gqa=True)))


def build():
    return reset(VideoModel(Grouped))
