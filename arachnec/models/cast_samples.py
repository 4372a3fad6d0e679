"""A model file whose samples have the precision that a run gives them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from arachnec.data.clip import VideoClip
from arachnec.models.file import ModelFile


@dataclass(frozen=True)
class CastSamples:
    """``dtype`` is what floating-point arguments are cast to; None leaves them."""

    model_file: ModelFile
    dtype: torch.dtype | None

    @property
    def build(self) -> Callable[[], nn.Module]:
        return self.model_file.build

    @property
    def encoders(self) -> Callable[[], dict[str, nn.Module]] | None:
        return self.model_file.encoders

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor] | None:
        return self.model_file.loss

    def sample(self, clip: VideoClip, generator: torch.Generator) -> tuple[dict[str, object], Tensor]:
        kwargs, target = self.model_file.sample(clip, generator)
        return {name: self._cast(value) for name, value in kwargs.items()}, target

    def _cast(self, value: object) -> object:
        """By the rule of ``make_batch``: batched arguments of two or more dimensions, not timesteps, not tables."""
        batched = isinstance(value, Tensor) and value.ndim >= 2 and value.shape[0] == 1 and value.is_floating_point()
        return value.to(self.dtype) if batched and isinstance(value, Tensor) and self.dtype is not None else value
