"""What ``benchmarks/kernels`` measures: each kernel with its eager form, on one sample, four, and a packed sequence."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from arachnec.kernels.rowwise.bias_gelu import bias_gelu
from arachnec.kernels.rowwise.gate_residual import gate_residual
from arachnec.kernels.rowwise.norm_modulate import gate_residual_norm_modulate, norm_modulate
from arachnec.kernels.rowwise.norm_rope import norm_rope

LAYOUTS = ("batch 1", "batch 4", "packed")
HEAD = 128


@dataclass(frozen=True)
class Case:
    """``fused`` and ``eager`` take ``tensors``; bytes are the least a forward and a backward in one pass must move."""

    kernel: str
    layout: str
    tokens: int
    hidden: int
    tensors: tuple[Tensor, ...]
    fused: Callable[..., tuple[Tensor, ...]]
    eager: Callable[..., tuple[Tensor, ...]]
    forward_bytes: int
    backward_bytes: int


def segment_lengths(tokens: int) -> list[int]:
    """A packed sequence as uneven as [1, 1560, 7, 32760] is."""
    middle = max(1, tokens // 22)
    return [1, middle, 7, tokens - middle - 8]


def segment_of(tokens: int, device: torch.device | str) -> Tensor:
    """The segment of each token."""
    return torch.repeat_interleave(torch.arange(4), torch.tensor(segment_lengths(tokens))).to(device)


KERNELS = (
    "norm, modulate",
    "gate, residual, norm, modulate",
    "gate, residual",
    "norm across heads, RoPE",
    "norm per head, RoPE",
    "bias, GELU",
)


def cases(
    tokens: int, hidden: int, layout: str, dtype: torch.dtype, device: torch.device, kernels: tuple[str, ...] = KERNELS
) -> Iterator[Case]:
    """Kernels on ``tokens`` tokens a sample, or in all where packed; the tensors are made when it is their turn."""
    torch.manual_seed(0)
    batch = 4 if layout == "batch 4" else 1
    packed = layout == "packed"
    lengths = segment_lengths(tokens)
    cumulative = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device) if packed else None
    segment = segment_of(tokens, device) if packed else None
    shape = (tokens, hidden) if packed else (batch, tokens, hidden)
    groups = (4, hidden) if packed else (batch, 1, hidden)

    def rows(*size: int) -> Tensor:
        return torch.randn(size or shape, dtype=dtype, device=device, requires_grad=True)

    def vector(*size: int) -> Tensor:
        return torch.randn(size, device=device, requires_grad=True)

    def spread(v: Tensor) -> Tensor:
        return v if segment is None else v.index_select(0, segment)

    def norm_eager(x: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, ...]:
        y = F.layer_norm(x.to(scale.dtype), x.shape[-1:], eps=1e-6) * (1 + spread(scale)) + spread(shift)
        return (y.to(x.dtype),)

    def gated_eager(branch: Tensor, x: Tensor, gate: Tensor, scale: Tensor, shift: Tensor) -> tuple[Tensor, ...]:
        h = (x.to(gate.dtype) + branch * spread(gate)).to(x.dtype)
        return h, *norm_eager(h, scale, shift)

    def gelu_eager(x: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return (F.gelu(x + bias, approximate="tanh"),)

    samples = 1 if packed else batch
    angle = torch.randn(tokens, HEAD // 2, device=device)
    cos, sin = angle.cos(), angle.sin()

    def rope_eager(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        if weight.shape[0] == HEAD:
            normed = F.rms_norm(x, (HEAD,), weight, 1e-6)
        else:
            normed = F.rms_norm(x.flatten(2), (hidden,), weight, 1e-6).view(x.shape)
        lo, hi = normed.to(wide).unflatten(-1, (-1, 2)).unbind(-1)
        c, s = cos.to(wide)[:, None], sin.to(wide)[:, None]
        return (torch.stack([lo * c - hi * s, lo * s + hi * c], -1).flatten(-2).to(x.dtype),)

    values = samples * tokens * hidden * torch.finfo(dtype).bits // 8
    table = 2 * cos.numel() * 4
    heads = (samples, tokens, hidden // HEAD, HEAD)

    def case(kernel: str, tensors: tuple[Tensor, ...], fused: Callable[..., tuple[Tensor, ...]], eager: Callable[..., tuple[Tensor, ...]], forward: int, backward: int) -> Case:  # fmt: skip  # noqa: E501
        return Case(kernel, layout, tokens, hidden, tensors, fused, eager, forward, backward)

    def rope(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (norm_rope(x, weight, None, cos, sin),)

    builders = {
        "norm, modulate": lambda name: case(
            name,
            (rows(), vector(*groups), vector(*groups)),
            lambda x, scale, shift: (norm_modulate(x, scale, shift, cu_seqlens=cumulative),),
            norm_eager,
            2 * values,
            3 * values,
        ),
        "gate, residual, norm, modulate": lambda name: case(
            name,
            (rows(), rows(), vector(*groups), vector(*groups), vector(*groups)),
            lambda *tensors: gate_residual_norm_modulate(*tensors, cu_seqlens=cumulative),
            gated_eager,
            4 * values,
            6 * values,
        ),
        "gate, residual": lambda name: case(
            name,
            (rows(), rows(), vector(*groups)),
            lambda branch, x, gate: (gate_residual(branch, x, gate, cu_seqlens=cumulative),),
            lambda branch, x, gate: ((x.to(gate.dtype) + branch * spread(gate)).to(x.dtype),),
            3 * values,
            3 * values,
        ),
        "norm across heads, RoPE": lambda name: case(
            name, (rows(*heads), rows(hidden)), rope, rope_eager, 2 * values + table, 3 * values + table
        ),
        "norm per head, RoPE": lambda name: case(
            name, (rows(*heads), rows(HEAD)), rope, rope_eager, 2 * values + table, 3 * values + table
        ),
        "bias, GELU": lambda name: case(
            name,
            (rows(), rows(hidden)),
            lambda x, bias: (bias_gelu(x, bias, approximate="tanh"),),
            gelu_eager,
            2 * values,
            3 * values,
        ),
    }
    for kernel in kernels:
        yield builders[kernel](kernel)
