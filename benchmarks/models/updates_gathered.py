"""A small transformer behind an encoder, whose weights take about as long over gloo as a clip takes: see
``benchmarks/sharded/gathers_on_gloo.py``."""

import torch
from plain_transformer import PlainTransformer
from torch import nn

WIDTH, HEADS, BLOCKS = 768, 12, 8


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
    return PlainTransformer(16, WIDTH, HEADS, BLOCKS)


def encoders():
    return {"vae": Latents()}


def sample(clip, generator):
    noise = torch.randn(1, tokens(clip), 16, generator=generator)
    time = torch.rand(1, generator=generator)
    return {"x": clip.encoded["vae"] + time * noise, "t": time}, noise


def loss(prediction, target):
    return nn.functional.mse_loss(prediction.float(), target)


def tokens(clip):
    return clip.frames * (clip.height // 8) * (clip.width // 8)
