"""Attention written out: two matrix products and a softmax."""

import math

from parts import Block, VideoModel, join_heads, loss, reset, sample, split_heads  # noqa: F401


class Manual(Block):
    def attend(self, x):
        q = split_heads(self.attention.q(x))
        k, v = (split_heads(y) for y in self.attention.kv(x).chunk(2, dim=-1))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        return self.attention.out(join_heads(scores.softmax(dim=-1) @ v))


def build():
    return reset(VideoModel(Manual))
