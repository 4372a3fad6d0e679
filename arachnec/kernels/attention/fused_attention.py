"""torch's fused attention kernels that return the log-sum-exp, one form for all devices.

On CPUs the flash kernel; on GPUs FlashAttention-2 (arXiv 2307.08691) in half precision where nothing is masked, else
the memory-efficient kernel. Dropout never happens here, so the kernels' random state is a placeholder.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
ALIGNMENT = 8  # elements a row of a head, or of a bias, must be a multiple of for the kernels on GPUs
LSE_ALIGNMENT = 32  # the memory-efficient kernel pads the log-sum-exp to this many rows


def has_kernel(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether there is a fused kernel for tensors of these sizes, this dtype and device."""
    if query.device.type == "cpu":
        return query.shape[3] == value.shape[3]
    if query.device.type != "cuda" or query.dtype not in (*HALF, torch.float32):
        return False
    return query.shape[3] % ALIGNMENT == 0 and value.shape[3] % ALIGNMENT == 0


def _flash(query: Tensor, value: Tensor, bias: Tensor | None) -> bool:
    return bias is None and query.dtype in HALF and query.shape[3] == value.shape[3] <= 256


def fused_forward(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, triangle: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [B, H, Lq, Dv] and natural-log sum of exponentials [B, H, Lq] (in rows that see nothing: undefined).

    ``bias`` [B or 1, H or 1, Lq or 1, Lk] is added to the scores; ``triangle`` keeps the keys up to the query's row.
    """
    query, key, value = _dense(query), _dense(key), _dense(value)
    if query.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, triangle, attn_mask=bias, scale=scale
        )
        return out, lse
    if _flash(query, value, bias):
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, triangle, False, scale=scale
        )
        return out, lse
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, _aligned(bias, query, key), True, 0.0, triangle, scale=scale
    )
    return out, lse[..., : query.shape[2]]


def fused_backward(
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
    if query.device.type == "cpu":
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, lse, 0.0, triangle, attn_mask=bias, scale=scale
        )
        return dq, dk, dv
    if _flash(query, value, bias):
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)
        unused = torch.zeros((), dtype=torch.uint64, device=query.device)
        lengths = (query.shape[2], key.shape[2])
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            grad,
            query,
            key,
            value,
            out,
            lse.contiguous(),
            None,
            None,
            *lengths,
            0.0,
            triangle,
            state,
            unused,
            scale=scale,
        )
        return dq, dk, dv
    padding = -lse.shape[2] % LSE_ALIGNMENT
    lse = F.pad(lse, (0, padding), value=math.inf).contiguous()
    seed = torch.zeros((), dtype=torch.int64, device=query.device)
    bias, wanted = _aligned(bias, query, key), [True, True, True, False]
    dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad, query, key, value, bias, out, lse, seed, seed, 0.0, wanted, triangle, scale=scale
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
