"""What the hand-written models share: sizes, a shell around the blocks, the training objective."""

import math
import zlib

import torch
import torch.nn.functional as F
from torch import nn

CHANNELS, STRIDE, PATCH = 4, 8, 2
WIDTH, HEADS, TEXT = 24, 3, 12


def latent_shape(clip, channels=CHANNELS, stride=(4, 8, 8), patch=(1, 2, 2)):
    """[1, C, F, H, W], whole patches; the first latent frame is one frame."""
    sizes = (clip.frames, clip.height, clip.width)
    tokens = (math.ceil(math.ceil(n / s) / p) for n, s, p in zip(sizes, stride, patch, strict=True))
    return (1, channels, *(n * p for n, p in zip(tokens, patch, strict=True)))


def fixed(shape, name):
    """Data of a clip: the same in every step."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def noised(clip, generator, shape):
    x0 = fixed(shape, f"video/{clip.id}")
    t = torch.rand(1, generator=generator)
    noise = torch.randn(shape, generator=generator)
    return (1 - t) * x0 + t * noise, t, noise - x0


def text_of(clip, width=TEXT):
    return fixed((1, clip.text_tokens, width), f"text/{clip.id}")


def sample(clip, generator):
    x, t, target = noised(clip, generator, latent_shape(clip))
    return {"latents": x, "text": text_of(clip), "t": t}, target


def called(clip, generator, **more):
    """What most of Diffusers' video transformers are called with, and the target."""
    x, t, target = noised(clip, generator, latent_shape(clip))
    text = fixed((1, clip.text_tokens, 16), f"text/{clip.id}")
    return {
        "hidden_states": x,
        "timestep": 1000 * t,
        "encoder_hidden_states": text,
        "return_dict": False,
        **more,
    }, target


def loss(prediction, target):
    return F.mse_loss(prediction, target)


def sinusoid(t, width=WIDTH):
    speed = 100.0 ** (-torch.arange(width // 2, device=t.device) / (width // 2))
    angle = 100 * t[:, None] * speed
    return torch.cat([angle.cos(), angle.sin()], dim=-1)


def split_heads(x, heads=HEADS):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def join_heads(x):
    return x.transpose(1, 2).flatten(2)


def table(length, width):
    """Rotary cosines and sines [length, width / 2] of one axis."""
    angle = torch.arange(length)[:, None] * 30.0 ** (-torch.arange(width // 2) / (width // 2))
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Attention(nn.Module):
    """Self-attention, or cross-attention where a context is given, by the fused operator."""

    def __init__(self, width=WIDTH, heads=HEADS, context=None):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(context or width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, context=None, rotary=None, mask=None):
        q = split_heads(self.q(x), self.heads)
        k, v = (split_heads(y, self.heads) for y in self.kv(x if context is None else context).chunk(2, dim=-1))
        if rotary is not None:
            q, k = rotate(q, *rotary), rotate(k, *rotary)
        return self.out(join_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))


def mlp(width=WIDTH):
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(approximate="tanh"), nn.Linear(2 * width, width))


class Block(nn.Module):
    """A DiT block: modulated self-attention, cross-attention, MLP."""

    def __init__(self, width=WIDTH, heads=HEADS):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width)
        self.norm3 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.cross = Attention(width, heads)
        self.mlp = mlp(width)
        self.modulation = nn.Linear(width, 3 * width)

    def attend(self, x):
        return self.attention(x)

    def forward(self, x, text, time):
        shift, scale, gate = self.modulation(F.silu(time))[:, None].chunk(3, dim=-1)
        x = x + gate * self.attend(self.norm1(x) * (1 + scale) + shift)
        x = x + self.cross(self.norm2(x), text)
        return x + self.mlp(self.norm3(x))


class VideoModel(nn.Module):
    """Patches in, patches out; ``run`` is what a model changes."""

    def __init__(self, block=Block, layers=2, width=WIDTH):
        super().__init__()
        self.embed = nn.Conv3d(CHANNELS, width, (1, PATCH, PATCH), (1, PATCH, PATCH))
        self.text = nn.Linear(TEXT, width)
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList([block() for _ in range(layers)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CHANNELS * PATCH**2)

    def run(self, x, text, time, grid):
        for block in self.blocks:
            x = block(x, text, time)
        return x

    def forward(self, latents, text, t):
        x = self.embed(latents)
        grid = tuple(x.shape[2:])
        x = self.run(
            x.flatten(2).transpose(1, 2), self.text(text), self.time(sinusoid(t, self.norm.weight.numel())), grid
        )
        x = self.head(self.norm(x)).unflatten(1, grid).unflatten(-1, (CHANNELS, PATCH, PATCH))
        return x.permute(0, 4, 1, 2, 5, 3, 6).flatten(5, 6).flatten(3, 4)


def reset(model, seed=None):
    """Weights in which no parameter is zero or one, so that every gradient counts."""
    for parameter in model.parameters():
        if parameter.device.type != "meta":
            with torch.no_grad():
                fan = parameter.shape[-1] if parameter.ndim > 1 else 4
                parameter.add_(torch.randn_like(parameter) * 0.3 / math.sqrt(fan))
    return model
