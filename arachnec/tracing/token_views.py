"""Calls that rearrange a tensor and compute nothing: what a model does to its tokens between blocks over frames and
blocks over places."""

from __future__ import annotations

import torch
from torch import Tensor

RESHAPES = frozenset(
    {Tensor.reshape, Tensor.view, Tensor.flatten, Tensor.unflatten, Tensor.unsqueeze, Tensor.squeeze}
    | {torch.reshape, torch.flatten, torch.unflatten, torch.unsqueeze, torch.squeeze}
)
PERMUTATIONS = frozenset(
    {Tensor.permute, Tensor.transpose, Tensor.movedim, Tensor.swapaxes, Tensor.swapdims, Tensor.mT.__get__}  # type: ignore[attr-defined]
    | {torch.permute, torch.transpose, torch.movedim, torch.swapaxes, torch.swapdims}
)
COPIES = frozenset({Tensor.contiguous, Tensor.clone, torch.clone})
TOKEN_VIEWS = RESHAPES | PERMUTATIONS | COPIES
