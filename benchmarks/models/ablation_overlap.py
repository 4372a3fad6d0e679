"""A transformer with many weights for few tokens, so that summing its gradients takes as long as computing them.

A token is 16 x 16 pixels of a frame; a frozen encoder of a few layers makes 16 channels of each. Pixels are drawn by
the clip's id, nothing is read from disk.
"""

import torch
import torch.nn.functional as F
from plain_transformer import PlainTransformer
from torch import nn

WIDTH, HEADS, CHANNELS, LAYERS, PATCH, ENCODER = 256, 8, 16, 8, 16, 512


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
    return PlainTransformer(CHANNELS, WIDTH, HEADS, LAYERS)


def encoders():
    return {"vae": Pixels()}


def sample(clip, generator):
    clean = clip.encoded["vae"]
    noise = torch.randn(clean.shape, generator=generator)
    t = torch.rand(1, generator=generator)
    return {"x": (1 - t) * clean + t * noise, "t": t}, noise - clean


def loss(prediction, target):
    return F.mse_loss(prediction, target)
