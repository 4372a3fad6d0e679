"""A small transformer behind an encoder, whose weights take about as long over gloo as a clip takes: see
``benchmarks/sharded/gathers_on_gloo.py``."""

import torch
from torch import nn

WIDTH, HEADS, BLOCKS = 768, 12, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x, time):
        b, s, c = x.shape
        q, k, v = self.qkv(self.norm(x) * (1 + time[:, None])).view(b, s, 3, HEADS, c // HEADS).unbind(2)
        y = nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        x = x + self.out(y.transpose(1, 2).reshape(b, s, c))
        return x + self.mlp(x)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(16, WIDTH)
        self.time = nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x, time):
        t = self.time(time[:, None].to(x.dtype))
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, t)
        return self.head(x)


class Latents(nn.Module):
    """As deep as it must be to take as long as a few blocks."""

    def __init__(self):
        super().__init__()
        self.project = nn.Sequential(
            nn.Linear(16, 1024), *(nn.Linear(1024, 1024) for _ in range(12)), nn.Linear(1024, 16)
        )

    def load(self, clip, device):
        return torch.linspace(0, 1, 16 * tokens(clip), device=device).view(1, -1, 16)

    def forward(self, x):
        return torch.sin(self.project(x))


def build():
    return Small()


def encoders():
    return {"vae": Latents()}


def sample(clip, generator):
    noise = torch.randn(1, tokens(clip), 16, generator=generator)
    time = torch.rand(1, generator=generator)
    return {"x": clip.encoded["vae"] + time * noise, "time": time}, noise


def loss(prediction, target):
    return nn.functional.mse_loss(prediction.float(), target)


def tokens(clip):
    return clip.frames * (clip.height // 8) * (clip.width // 8)
