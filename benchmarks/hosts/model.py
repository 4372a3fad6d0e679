"""A model whose tokens are wide and whose blocks compute little, so that the network decides what a step takes.

Attention is 8 heads of 32 on a residual stream of 32, and a frozen encoder hands off 128 channels for each token. A
token is 8 x 8 pixels of a frame. Nothing is read from disk: the pixels are drawn by the clip's id.
"""

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, HEADS, HEAD, CHANNELS, LAYERS, PATCH = 32, 8, 32, 128, 1, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * HEAD)
        self.out = nn.Linear(HEADS * HEAD, WIDTH)

    def forward(self, x, time):
        h = self.norm(x) * (1 + time[:, None])
        q, k, v = self.qkv(h).unflatten(2, (3, HEADS, HEAD)).permute(2, 0, 3, 1, 4).unbind(0)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(CHANNELS, WIDTH)
        self.time = nn.Linear(1, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x, t):
        time = self.time(t[:, None])
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, time)
        return self.head(x)


class Pixels(nn.Module):
    """Stands for a video encoder: 128 channels for each patch of 8 x 8 pixels."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(PATCH**2, CHANNELS)

    def load(self, clip, device):
        shape = (1, tokens(clip), PATCH**2)
        if torch.device(device).type == "meta":
            return torch.empty(shape, device=device)
        return torch.randn(shape, generator=torch.Generator().manual_seed(int(clip.id))).to(device)

    def forward(self, pixels):
        return torch.tanh(self.project(pixels))


def tokens(clip):
    return clip.frames * (clip.height // PATCH) * (clip.width // PATCH)


def build():
    return Wide()


def encoders():
    return {"vae": Pixels()}


def sample(clip, generator):
    clean = clip.encoded["vae"]
    noise = torch.randn(clean.shape, generator=generator)
    t = torch.rand(1, generator=generator)
    return {"x": (1 - t) * clean + t * noise, "t": t}, (noise - clean)[..., :4]


def loss(prediction, target):
    return F.mse_loss(prediction, target)
