"""A small model in the place of the real one: as many layers, as many parts, which train and which share parameters.

A program says nothing of a model but its layers. So one of a few numbers a layer shows whether the program computes
what it should. It is in float64: a wrong weight is told from rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from arachnec.data.clip import VideoClip
from arachnec.models.file import ModelFile

CHANNELS = 4  # of a token, as encoders make it
NUMBER = torch.float64


@dataclass(frozen=True)
class Form:
    """``trains`` for every layer, in the order they run; ``shared`` are sets of layers that read one parameter."""

    trains: tuple[bool, ...]
    shared: tuple[frozenset[int], ...] = ()
    ends_train: bool = True  # what lies outside the layers
    first_trains: bool = True  # the stage of the embeddings: one without a backward trains nothing
    heads: int = 2
    encoders: tuple[str, ...] = ()


class Block(nn.Module):
    def __init__(self, width: int, heads: int, shared: list[nn.Parameter]) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.shared = nn.ParameterList(shared)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        scale = 1 + time[:, None]
        for parameter in self.shared:
            scale = scale + parameter
        parts = self.qkv(x * scale).view(batch, tokens, 3, self.heads, width // self.heads).unbind(2)
        query, key, value = (part.transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return x + torch.tanh(self.out(mixed.transpose(1, 2).reshape(batch, tokens, width)))


class StandIn(nn.Module):
    def __init__(self, form: Form) -> None:
        super().__init__()
        width = 2 * form.heads
        self.embed = nn.Linear(CHANNELS, width)
        self.time = nn.Linear(1, width)
        shared = [nn.Parameter(torch.full((width,), 0.1 + number)) for number in range(len(form.shared))]
        self.blocks = nn.ModuleList(
            Block(width, form.heads, [shared[n] for n, layers in enumerate(form.shared) if layer in layers])
            for layer in range(len(form.trains))
        )
        self.head = nn.Linear(width, CHANNELS)
        self.to(NUMBER)
        for name, parameter in self.named_parameters():
            root, layer, *_ = f"{name}.".split(".")
            ends_train = form.ends_train and (root == "head" or form.first_trains)
            parameter.requires_grad_(form.trains[int(layer)] if root == "blocks" else ends_train)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        scale = self.time(time[:, None])
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, scale)
        return cast(Tensor, self.head(x))


class Encoder(nn.Module):
    """Of a clip's place in the batch and its size: no two clips give the same."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Conv3d(2, CHANNELS, 3, padding=1, dtype=NUMBER)

    def load(self, clip: VideoClip, device: torch.device) -> Tensor:
        shape = 2, clip.frames, clip.height // 8, clip.width // 8
        values = torch.arange(math.prod(shape), dtype=NUMBER, device=device)
        return torch.sin(values * (1 + int(clip.id))).view(1, *shape)

    def forward(self, loaded: Tensor) -> Tensor:
        return torch.tanh(cast(Tensor, self.mix(loaded)))


def tokens(clip: VideoClip) -> int:
    return clip.frames * (clip.height // 8) * (clip.width // 8)


def stand_in(form: Form) -> ModelFile:
    """The model file of this form."""
    return ModelFile(
        build=partial(StandIn, form),
        sample=_sample,
        loss=_loss,
        encoders=partial(_encoders, form.encoders) if form.encoders else None,
        path=Path(__file__),
        digest="",
    )


def _sample(clip: VideoClip, generator: torch.Generator) -> tuple[dict[str, object], Tensor]:
    noise = torch.randn(1, tokens(clip), CHANNELS, generator=generator, dtype=NUMBER)
    time = torch.rand(1, generator=generator, dtype=NUMBER)
    x = 1 + time * noise
    for number, part in enumerate(_flat(clip), 1):
        x = x + part * number
    return {"x": x, "time": time}, noise


def _flat(clip: VideoClip) -> Iterator[Tensor]:
    for _, value in sorted(clip.encoded.items()):
        yield value.flatten(2).transpose(1, 2)


def _loss(prediction: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(prediction, target)


def _encoders(names: tuple[str, ...]) -> dict[str, nn.Module]:
    return {name: Encoder() for name in names}
