"""The demo's encoders and decoder, none of which is trained: blocks of pixels to a few cosines and back, and a small
text encoder with random weights.

A latent frame stands for the first frame, or for four; a latent pixel for 8 x 8. Its 12 channels are the four lowest
cosines of each colour, so what is decoded is soft, and moves in steps of four frames.
"""

import math

import torch
from torch import nn
from transformers import ByT5Tokenizer, UMT5Config, UMT5EncoderModel

from arachnec.models.encoders import TextEncoder, VideoEncoder

STRIDE, FRAMES = 8, 4
ORDERS = ((0, 0), (0, 1), (1, 0), (1, 1))
TEXT = 96  # tokens that captions are padded to
CHANNELS = 3 * len(ORDERS)
SPREAD = (0.5, 0.15, 0.15, 0.08)  # of each cosine over natural videos, roughly: scaled by it, latents are like noise
LARGE = {"num_layers": 5, "num_attention_heads": 6, "attention_head_dim": 24, "ffn_dim": 576}
SMALL = {"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 24, "ffn_dim": 192}
SHAPES = {"in_channels": CHANNELS, "out_channels": CHANNELS, "text_dim": 64, "freq_dim": 64}


def cosines() -> torch.Tensor:
    """Of one colour, orthonormal: ``[orders, 8, 8]``."""
    place = (torch.arange(STRIDE) + 0.5) * math.pi / STRIDE
    rows = [(torch.cos(order * place) * math.sqrt((1 if order == 0 else 2) / STRIDE)) for order in range(2)]
    return torch.stack([rows[a][:, None] * rows[b][None] for a, b in ORDERS])


def spread() -> torch.Tensor:
    """Of each channel ``[1, channels, 1, 1, 1]``, in the unit of the orthonormal cosines."""
    return torch.tensor(SPREAD).repeat(3).view(1, -1, 1, 1, 1) * STRIDE


class Cosines(VideoEncoder):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.multiple = 2 * STRIDE
        self.register_buffer("basis", cosines())
        self.register_buffer("spread", spread())

    @torch.no_grad()
    def forward(self, loaded: torch.Tensor) -> torch.Tensor:
        pixels = loaded.to(self.basis.dtype) / 127.5 - 1
        frames = pixels[:, :, :1]
        if pixels.shape[2] > 1:
            frames = torch.cat([frames, pixels[:, :, 1:].unflatten(2, (-1, FRAMES)).mean(3)], dim=2)
        frames = frames.unflatten(4, (-1, STRIDE)).unflatten(3, (-1, STRIDE))
        latents = torch.einsum("bcfhywx,oyx->bcofhw", frames, self.basis)
        return latents.flatten(1, 2) / self.spread


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("basis", cosines())
        self.register_buffer("spread", spread())

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        coded = (latents * self.spread).unflatten(1, (3, -1))
        frames = torch.einsum("bcofhw,oyx->bcfhywx", coded, self.basis).flatten(5, 6).flatten(3, 4)
        return torch.cat([frames[:, :, :1], frames[:, :, 1:].repeat_interleave(FRAMES, dim=2)], dim=2)


def text_encoder() -> TextEncoder:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        text = UMT5EncoderModel(
            UMT5Config(vocab_size=384, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0)
        )
    return TextEncoder(ByT5Tokenizer(), text)


def encoders() -> dict[str, nn.Module]:
    return {"vae": Cosines(), "text": text_encoder()}
