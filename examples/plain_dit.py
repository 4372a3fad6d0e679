"""A diffusion transformer written in plain PyTorch: what a model file looks like without an adapter.

Self-attention with rotary positions over the video tokens, cross-attention to the caption's bytes, adaptive LayerNorm
(DiT, arXiv 2212.09748). The latents are synthetic: noise seeded by the clip's id stands in for an encoder's output.
"""

import zlib

import torch
import torch.nn.functional as F
from torch import nn

CHANNELS, PATCH, STRIDE = 8, 2, 8  # latent channels; latent pixels per token and pixels per latent pixel, each way
WIDTH, HEADS, LAYERS = 192, 6, 6


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x, context, rotary=None):
        q, k, v = self.query(x), self.key(context), self.value(context)
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width)
        self.norm3 = nn.LayerNorm(width, elementwise_affine=False)
        self.self_attention = Attention(width, heads)
        self.cross_attention = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x, text, time, rotary):
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(time)[:, None].chunk(6, dim=2)
        h = self.norm1(x) * (1 + scale1) + shift1
        x = x + gate1 * self.self_attention(h, h, rotary)
        x = x + self.cross_attention(self.norm2(x), text)
        h = self.norm3(x) * (1 + scale2) + shift2
        return x + gate2 * self.mlp(h)


class VideoDiT(nn.Module):
    def __init__(self, width=WIDTH, heads=HEADS, layers=LAYERS):
        super().__init__()
        self.width, self.head_width = width, width // heads
        self.embed = nn.Linear(CHANNELS * PATCH**2, width)
        self.text = nn.Embedding(257, width)  # bytes, and the end of the caption
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CHANNELS * PATCH**2)

    def forward(self, latents, caption, t):
        """``latents [B, C, F, H, W]``, ``caption [B, T]`` of int64, ``t [B]`` in [0, 1): a velocity as ``latents``."""
        batch, _, frames, height, width = latents.shape
        grid = (frames, height // PATCH, width // PATCH)
        x = latents.unflatten(4, (grid[2], PATCH)).unflatten(3, (grid[1], PATCH))
        x = self.embed(x.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3))
        time = self.time(sinusoid(1000 * t, self.width).to(x.dtype))
        rotary = [table.to(x.dtype) for table in rotary_table(grid, self.head_width, latents.device)]
        text = self.text(caption)
        for block in self.blocks:
            x = block(x, text, time, rotary)
        x = self.head(self.norm(x)).view(batch, *grid, CHANNELS, PATCH, PATCH)
        return x.permute(0, 4, 1, 2, 5, 3, 6).flatten(5, 6).flatten(3, 4)


def rotate(x, cos, sin):
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)


def rotary_table(grid, width, device):
    """Cosines and sines ``[tokens, width / 2]``; a third of the pairs turn with height, with width, with time."""
    pairs = (width // 2 - 2 * (width // 6), width // 6, width // 6)
    angles = []
    for axis, (length, count) in enumerate(zip(grid, pairs, strict=True)):
        speed = 100.0 ** (-torch.arange(count, device=device) / count)
        angle = torch.arange(length, device=device)[:, None] * speed
        shape = [1, 1, 1, count]
        shape[axis] = length
        angles.append(angle.view(shape).expand(*grid, count))
    angle = torch.cat(angles, dim=-1).flatten(0, 2)
    return angle.cos(), angle.sin()


def sinusoid(t, width):
    speed = 10000.0 ** (-torch.arange(width // 2, device=t.device) / (width // 2))
    angle = t[:, None] * speed
    return torch.cat([angle.cos(), angle.sin()], dim=1)


def build():
    return VideoDiT()


def sample(clip, generator):
    shape = (
        1,
        CHANNELS,
        (clip.frames + 3) // 4,
        *(-(-n // (STRIDE * PATCH)) * PATCH for n in (clip.height, clip.width)),
    )
    caption = list((clip.caption or "").encode())[: clip.text_tokens - 1]
    caption = [*caption, *[256] * (clip.text_tokens - len(caption))]
    data = torch.Generator().manual_seed(zlib.crc32(str(clip.id).encode()))
    x0 = torch.randn(shape, generator=data)
    noise = torch.randn(shape, generator=generator)
    t = torch.rand(1, generator=generator)
    arguments = {"latents": (1 - t) * x0 + t * noise, "caption": torch.tensor([caption]), "t": t}
    return arguments, noise - x0


def loss(prediction, target):
    return F.mse_loss(prediction, target)
