"""The precision of a model's weights."""

from __future__ import annotations

import torch
from torch import nn


def in_precision(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the floating-point weights to ``dtype`` in place, except those that the model's class keeps in fp32.

    Diffusers and transformers name these in ``_keep_in_fp32_modules``, which ``from_pretrained`` honours too.
    """
    keep_in_fp32 = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and not keep_in_fp32 & set(name.split(".")):
            tensor.data = tensor.data.to(dtype)
    return model
