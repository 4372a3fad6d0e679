"""Causal self-attention over the tokens in time order."""

import torch.nn.functional as F
from parts import Block, VideoModel, join_heads, loss, reset, sample, split_heads  # noqa: F401


class Causal(Block):
    def attend(self, x):
        q = split_heads(self.attention.q(x))
        k, v = (split_heads(y) for y in self.attention.kv(x).chunk(2, dim=-1))
        return self.attention.out(join_heads(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


def build():
    return reset(VideoModel(Causal))
