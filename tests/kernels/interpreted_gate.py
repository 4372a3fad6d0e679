"""Runs the gated residual's kernels in Triton\'s interpreter; ``main`` gives {case: {tensor: error}}."""

import torch

from arachnec.kernels.rowwise import gate_residual
from arachnec.kernels.rowwise.row_groups import row_groups
from arachnec.kernels.rowwise.row_launch import Launch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def errors(grouping: str, width: int, dtype: str) -> dict[str, float]:
    torch.manual_seed(1)
    stored, launch = DTYPES[dtype], Launch(16, 1, 1, 255, 4)
    lengths = torch.tensor([0, 1, 1, 9, 12]) if grouping == "segment" else None
    rows, groups = 12, {"all": 1, "sample": 3, "segment": 4, "token": 12}[grouping]
    branch, residual, dh = (torch.randn(rows, 2 * width).to(stored)[:, :width] for _ in range(3))
    gate = torch.randn(groups, width).to(stored)
    kept = row_groups(rows, (gate,), lengths, grouping == "token")
    h = gate_residual.launch_forward(branch, residual, gate, kept, launch)
    dbranch, dgate = gate_residual.launch_backward(dh, branch, gate, kept, True, launch)
    exact = [t.double().requires_grad_() for t in (branch, gate)]
    truth = residual.double() + kept.spread(exact[1]) * exact[0]
    truth.backward(dh.double())
    pairs = {"h": (h, truth), "dbranch": (dbranch, exact[0].grad), "dgate": (dgate, exact[1].grad)}
    return {name: float((got.double() - want).abs().max() / want.abs().max()) for name, (got, want) in pairs.items()}


def main() -> dict[str, dict[str, float]]:
    cases = [("sample", 40, "fp32"), ("segment", 24, "fp32"), ("token", 16, "fp32"), ("all", 40, "bf16")]
    return {" ".join(map(str, case)): errors(*case) for case in cases}
