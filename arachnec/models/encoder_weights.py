"""The weights of all encoders of a model file, from a pipeline's folder: each encoder's from a folder of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from arachnec.models.initial_weights import InitialWeights, encoder_weights


@dataclass(frozen=True)
class EncoderWeights:
    """``parts`` by the encoder's name, which precedes those of its tensors; none of encoders without a folder."""

    parts: Mapping[str, InitialWeights]

    @classmethod
    def of(cls, folder: Path, encoders: nn.Module) -> EncoderWeights:
        """Those of these encoders, the children of a module. Raises as ``encoder_weights``."""
        stored = {name: encoder_weights(folder, name, encoder) for name, encoder in encoders.named_children()}
        return cls({name: weights for name, weights in stored.items() if weights is not None})

    @property
    def sources(self) -> dict[str, str]:
        """Where each tensor comes from, as ``InitialWeights``."""
        return {f"{part}.{name}": source for part, own in self.parts.items() for name, source in own.sources.items()}

    def value(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """As ``InitialWeights``."""
        part, _, own = name.partition(".")
        return self.parts[part].value(own, dtype) if part in self.parts else None

    def piece(self, name: str, dtype: torch.dtype, start: int, size: int) -> Tensor:
        """As ``InitialWeights``."""
        part, _, own = name.partition(".")
        return self.parts[part].piece(own, dtype, start, size)

    def fill_buffers(self, encoders: nn.Module) -> None:
        """As ``InitialWeights``."""
        for part, own in self.parts.items():
            own.fill_buffers(encoders.get_submodule(part))

    def fingerprint(self) -> str:
        """As ``WeightFiles``."""
        prints = sorted((part, own.fingerprint()) for part, own in self.parts.items())
        return hashlib.sha256(repr(prints).encode()).hexdigest()
