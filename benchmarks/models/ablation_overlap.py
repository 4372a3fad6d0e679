"""A transformer with many weights for few tokens, so that summing its gradients takes as long as computing them.

A token is 16 x 16 pixels of a frame; a frozen encoder of a few layers makes 16 channels of each. Pixels are drawn by
the clip's id, nothing is read from disk.
"""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, CHANNELS, LAYERS, PATCH, ENCODER = 256, 8, 16, 8, 16, 512


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
        h = self.norm(x) * (1 + time[:, None])
        q, k, v = self.qkv(h).unflatten(2, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4).unbind(0)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(CHANNELS, WIDTH)
        self.time = nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, CHANNELS)

    def forward(self, x, t):
        time = self.time(t[:, None])
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, time)
        return self.head(x)


class Pixels(nn.Module):
    """Stands for a video encoder."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(PATCH**2, ENCODER),
            nn.GELU(),
            nn.Linear(ENCODER, ENCODER),
            nn.GELU(),
            nn.Linear(ENCODER, CHANNELS),
        )

    def load(self, clip, device):
        shape = (1, tokens(clip), PATCH**2)
        if torch.device(device).type == "meta":
            return torch.empty(shape, device=device)
        return torch.randn(shape, generator=torch.Generator().manual_seed(int(clip.id))).to(device)

    def forward(self, pixels):
        return torch.tanh(self.layers(pixels))


def tokens(clip):
    return clip.frames * (clip.height // PATCH) * (clip.width // PATCH)


def build():
    return Deep()


def encoders():
    return {"vae": Pixels()}


def sample(clip, generator):
    clean = clip.encoded["vae"]
    noise = torch.randn(clean.shape, generator=generator)
    t = torch.rand(1, generator=generator)
    return {"x": (1 - t) * clean + t * noise, "t": t}, noise - clean


def loss(prediction, target):
    return F.mse_loss(prediction, target)
