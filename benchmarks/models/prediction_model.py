"""The model of `prediction_accuracy.py`: examples/plain_dit.py behind an encoder that makes its latents from noise."""

import importlib.util
import zlib
from pathlib import Path

import torch
from torch import nn

_spec = importlib.util.spec_from_file_location("plain_dit", Path(__file__).parents[2] / "examples" / "plain_dit.py")
plain = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(plain)

build, loss = plain.build, plain.loss


class Encoder(nn.Module):
    """Pixels, 8 to a latent pixel each way and 4 frames to a latent frame, to latents."""

    def __init__(self, width=24):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(3, width, (1, 4, 4), stride=(1, 4, 4)),
            nn.SiLU(),
            nn.Conv3d(width, width, 3, stride=(2, 2, 2), padding=1),
            nn.SiLU(),
            nn.Conv3d(width, plain.CHANNELS, 3, stride=(2, 1, 1), padding=1),
        )

    def load(self, clip, device):
        height, width = (-(-size // 16) * 16 for size in (clip.height, clip.width))
        frames = 4 * ((clip.frames + 3) // 4)
        if device.type == "meta":
            return torch.empty(1, 3, frames, height, width, device=device)
        generator = torch.Generator().manual_seed(zlib.crc32(str(clip.id).encode()))
        return torch.rand(1, 3, frames, height, width, generator=generator).to(device)

    def forward(self, pixels):
        return self.layers(pixels)


def encoders():
    return {"vae": Encoder()}


def sample(clip, generator):
    caption = torch.full((1, clip.text_tokens), 256)
    x0 = clip.encoded["vae"]
    noise = torch.randn(x0.shape, generator=generator)
    t = torch.rand(1, generator=generator)
    return {"latents": (1 - t) * x0 + t * noise, "caption": caption, "t": t}, noise - x0
