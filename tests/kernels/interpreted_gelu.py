"""Runs the GELU kernels in Triton\'s interpreter; ``main`` gives {case: {tensor: error}}."""

import torch

from arachnec.kernels.rowwise import bias_gelu
from arachnec.kernels.rowwise.row_launch import Launch

DTYPES = {"fp32": torch.float32, "fp16": torch.float16}


def errors(approximate: str, rows: int, width: int, biased: bool, dtype: str) -> dict[str, float]:
    torch.manual_seed(1)
    stored, tanh, launch = DTYPES[dtype], approximate == "tanh", Launch(16, 1, 1, 255, 2)
    x, dy = torch.randn(rows, 2 * width).to(stored)[:, :width], torch.randn(rows, width).to(stored)
    bias = torch.randn(width).to(stored) if biased else None
    y = bias_gelu.launch_forward(x, bias, tanh, launch)
    dx, dbias = bias_gelu.launch_backward(dy, x, bias, tanh, biased, launch)
    exact = [t if t is None else t.double().requires_grad_() for t in (x, bias)]
    truth = torch.nn.functional.gelu(exact[0] + (exact[1] if biased else 0), approximate=approximate)
    truth.backward(dy.double())
    pairs = {"y": (y, truth), "dx": (dx, exact[0].grad)} | ({"dbias": (dbias, exact[1].grad)} if biased else {})
    return {name: float((got.double() - want).abs().max() / want.abs().max()) for name, (got, want) in pairs.items()}


def main() -> dict[str, dict[str, float]]:
    cases = [
        ("none", 11, 40, True, "fp32"),
        ("tanh", 11, 40, True, "fp32"),
        ("tanh", 3, 16, False, "fp32"),
        ("none", 9, 24, True, "fp16"),
    ]
    return {" ".join(map(str, case)): errors(*case) for case in cases}
