"""Rotary positions from complex buffers of the block, cut to the number of tokens; a config class."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from parts import Block, VideoModel, join_heads, loss, reset, sample, split_heads  # noqa: F401


@dataclass
class Config:
    layers: int = 3
    longest: int = 4096
    theta: float = 30.0


class Buffered(Block):
    def __init__(self, config):
        super().__init__()
        self.config = config
        angle = torch.outer(torch.arange(config.longest), config.theta ** (-torch.arange(4) / 4))
        self.register_buffer("rotary", torch.polar(torch.ones_like(angle), angle), persistent=False)
        self.register_buffer("scale", torch.tensor(0.3))

    def attend(self, x):
        q, k, v = (split_heads(y) for y in (self.attention.q(x), *self.attention.kv(x).chunk(2, dim=-1)))
        turn = self.rotary[: x.shape[1]]
        q, k = (
            torch.view_as_real(torch.view_as_complex(y.float().unflatten(-1, (-1, 2))) * turn).flatten(3)
            for y in (q, k)
        )
        return self.scale * self.attention.out(join_heads(F.scaled_dot_product_attention(q, k, v)))


def build():
    config = Config()
    return reset(VideoModel(lambda: Buffered(config), config.layers))
