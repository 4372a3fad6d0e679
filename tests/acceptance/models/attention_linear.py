"""Linear attention: keys and values are contracted over the tokens (SANA)."""

import torch.nn.functional as F
from parts import Block, VideoModel, join_heads, loss, reset, sample, split_heads  # noqa: F401


class Linear(Block):
    def attend(self, x):
        q = F.relu(split_heads(self.attention.q(x)))
        k, v = (split_heads(y) for y in self.attention.kv(x).chunk(2, dim=-1))
        k = F.relu(k)
        y = q @ (k.transpose(-2, -1) @ v)
        return self.attention.out(join_heads(y / (q @ k.sum(-2)[..., None] + 1)))


def build():
    return reset(VideoModel(Linear))
