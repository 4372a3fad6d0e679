"""The precision of a model's weights."""

from __future__ import annotations

import torch
from torch import nn


def in_precision(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model with its floating-point weights in ``dtype``, in place, but for those that its class keeps in fp32.

    These are what Diffusers and transformers name in ``_keep_in_fp32_modules``, as ``from_pretrained`` honours it.
    """
    kept = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and not kept & set(name.split(".")):
            tensor.data = tensor.data.to(dtype)
    return model
