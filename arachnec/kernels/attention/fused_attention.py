"""torch's fused attention kernels that return the log-sum-exp, one form for all of them.

Each is called by the name of its family (``arachnec.kernels.attention.attention_backend``). FlashAttention 3 is called
through FlashAttention 2's operator, where torch registers it. Dropout never happens here, so the kernels' random state
is a placeholder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.attention as torch_attention
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from arachnec.kernels.attention.attention_backend import (
    ALIGNMENT,
    CPU_FLASH,
    CUDNN,
    EFFICIENT,
    FLASH2,
    FLASH3,
    MATH,
    Capability,
    attention_backend,
)

LSE_ALIGNMENT = 32  # the memory-efficient kernel pads the log-sum-exp to this many rows
DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.float64: "f64"}
OF_SDPA = {
    FLASH2: SDPBackend.FLASH_ATTENTION,
    FLASH3: SDPBackend.FLASH_ATTENTION,
    CUDNN: SDPBackend.CUDNN_ATTENTION,
    EFFICIENT: SDPBackend.EFFICIENT_ATTENTION,
    CPU_FLASH: SDPBackend.FLASH_ATTENTION,
    MATH: SDPBackend.MATH,
}


def capability_of(device: torch.device) -> Capability:
    """What this device can run."""
    if device.type != "cuda":
        return Capability(device.type)
    active = getattr(torch_attention, "current_flash_attention_impl", lambda: None)()
    cudnn = torch.version.hip is None and torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
    return Capability("cuda", torch.cuda.get_device_capability(device), cudnn, active == "FA3")


def backend_for(query: Tensor, value: Tensor, masked: bool, preferred: str | None = None) -> str:
    """The family for heads like these on the device that they are on."""
    return attention_backend(
        capability_of(query.device),
        DTYPES.get(query.dtype, str(query.dtype)),
        query.shape[3],
        value_size=value.shape[3],
        masked=masked,
        preferred=preferred,
    )


@contextmanager
def sdpa_preferring(backend: str) -> Iterator[None]:
    """Inside, ``scaled_dot_product_attention`` takes this family where it can, and else torch's next."""
    first = OF_SDPA[backend]
    others = (kind for kind in OF_SDPA.values() if kind is not first)
    with sdpa_kernel([first, *others], set_priority=True):
        yield


def fused_forward(
    backend: str, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, triangle: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [B, H, Lq, Dv] and natural-log sum of exponentials [B, H, Lq] (in rows that see nothing: undefined).

    ``bias`` [B or 1, H or 1, Lq or 1, Lk] is added to the scores; only ``cpu-flash`` and ``efficient`` take one.
    ``triangle`` keeps the keys up to the query's row.
    """
    query, key, value = _dense(query), _dense(key), _dense(value)
    aten = torch.ops.aten
    if backend == CPU_FLASH:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, triangle, attn_mask=bias, scale=scale
        )
        return out, lse
    if backend == EFFICIENT:
        out, lse, *_ = aten._scaled_dot_product_efficient_attention(
            query, key, value, _aligned(bias, query, key), True, 0.0, triangle, scale=scale
        )
        return out, lse[..., : query.shape[2]]
    assert bias is None
    if backend == CUDNN:
        out, lse, *_ = aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, triangle, False, scale=scale
        )
        return out, lse.view(query.shape[:3])  # [B, H, Lq, 1]
    assert backend in (FLASH2, FLASH3)
    out, lse, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, triangle, False, scale=scale)
    return out, lse


def fused_backward(
    backend: str,
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bias: Tensor | None,
    triangle: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value, given an output and a finite log-sum-exp that may be of more keys."""
    grad, query, key, value, out = _dense(grad), _dense(query), _dense(key), _dense(value), _dense(out)
    aten = torch.ops.aten
    lengths = (query.shape[2], key.shape[2])
    if backend == CPU_FLASH:
        dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse, 0.0, triangle, attn_mask=bias, scale=scale
        )
        return dq, dk, dv
    if backend == EFFICIENT:
        lse = F.pad(lse, (0, -lse.shape[2] % LSE_ALIGNMENT), value=math.inf).contiguous()
        out = out.transpose(1, 2).contiguous().transpose(1, 2)  # in 16 bits it is read as the forward lays it
        seed = torch.zeros((), dtype=torch.int64, device=query.device)
        bias, wanted = _aligned(bias, query, key), [True, True, True, False]
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad, query, key, value, bias, out, lse, seed, seed, 0.0, wanted, triangle, scale=scale
        )
        return dq, dk, dv
    assert bias is None
    given = (grad, query, key, value, out, lse.contiguous())
    if backend == CUDNN:
        seed = torch.zeros((), dtype=torch.int64, device=query.device)
        given = (*given[:-1], given[-1][..., None])
        dq, dk, dv = aten._scaled_dot_product_cudnn_attention_backward(
            *given, seed, seed, None, None, None, *lengths, 0.0, triangle, scale=scale
        )
        return dq, dk, dv
    assert backend in (FLASH2, FLASH3)
    state = torch.zeros(2, dtype=torch.uint64, device=query.device)
    unused = torch.zeros((), dtype=torch.uint64, device=query.device)
    dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
        *given, None, None, *lengths, 0.0, triangle, state, unused, scale=scale
    )
    return dq, dk, dv


def _dense(x: Tensor) -> Tensor:
    """The kernels need the elements of a head side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _aligned(bias: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The bias as the memory-efficient kernel reads it: its rows start at aligned places, and no size is implied."""
    if bias is None:
        return None
    columns = bias.shape[-1]
    bias = F.pad(bias, (0, -columns % (2 * ALIGNMENT)))[..., :columns]
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
