"""The precision of a model's weights, and of its samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from typing_extensions import TypeIs

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
        return kwargs if self.dtype is None else arguments_in(kwargs, self.dtype), target


def arguments_in(arguments: Mapping[str, object], dtype: torch.dtype) -> dict[str, object]:
    """The arguments with the batched floating-point ones of two or more dimensions in ``dtype``, as ``make_batch`` has
    them.

    Timesteps and tables keep theirs.
    """
    return {name: value.to(dtype) if _carries_activations(value) else value for name, value in arguments.items()}


def _carries_activations(value: object) -> TypeIs[Tensor]:
    return isinstance(value, Tensor) and value.ndim >= 2 and value.shape[0] == 1 and value.is_floating_point()


def in_precision(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the floating-point weights to ``dtype`` in place, except those that the model's class keeps in fp32.

    Diffusers and transformers name these in ``_keep_in_fp32_modules``, which ``from_pretrained`` honours too.
    """
    keep_in_fp32 = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and not keep_in_fp32 & set(name.split(".")):
            tensor.data = tensor.data.to(dtype)
    return model
