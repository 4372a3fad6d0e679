"""MMDiT: text and video have weights of their own and attend jointly, text first; then single blocks over both."""

import torch
import torch.nn.functional as F
from parts import WIDTH, Attention, VideoModel, join_heads, loss, mlp, reset, sample, split_heads  # noqa: F401
from torch import nn


class Stream(nn.Module):
    def __init__(self):
        super().__init__()
        self.modulation = nn.Linear(WIDTH, 3 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.qnorm = nn.RMSNorm(WIDTH // 3)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = mlp()

    def prepare(self, x, time):
        shift, scale, gate = self.modulation(time)[:, None].chunk(3, dim=-1)
        q, k, v = (split_heads(y) for y in self.qkv(self.norm(x) * (1 + scale) + shift).chunk(3, dim=-1))
        return self.qnorm(q), k, v, gate

    def finish(self, x, y, gate):
        x = x + gate * self.out(y)
        return x + self.mlp(x)


class Dual(nn.Module):
    def __init__(self):
        super().__init__()
        self.text, self.video = Stream(), Stream()

    def forward(self, x, text, time):
        *a, gate_a = self.text.prepare(text, time)
        *b, gate_b = self.video.prepare(x, time)
        q, k, v = (torch.cat(pair, dim=2) for pair in zip(a, b, strict=True))
        y = join_heads(F.scaled_dot_product_attention(q, k, v))
        n = text.shape[1]
        return self.video.finish(x, y[:, n:], gate_b), self.text.finish(text, y[:, :n], gate_a)


class Single(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = mlp()

    def forward(self, x, time):
        y = self.norm(x) + time[:, None]
        return x + self.attention(y) + self.mlp(y)


class Model(VideoModel):
    def __init__(self):
        super().__init__(Dual)
        self.single = nn.ModuleList([Single(), Single()])

    def run(self, x, text, time, grid):
        for block in self.blocks:
            x, text = block(x, text, time)
        n = text.shape[1]
        x = torch.cat([text, x], dim=1)
        for block in self.single:
            x = block(x, time)
        return x[:, n:]


def build():
    return reset(Model())
