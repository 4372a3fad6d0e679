"""Runs the norm kernels in Triton\'s interpreter; ``main`` gives {case: {tensor: error}}.

The error is the greatest difference from float64 autograd of eager, over the greatest value there.
"""

import itertools

import torch
from torch import Tensor

from arachnec.kernels.rowwise import norm_launch
from arachnec.kernels.rowwise.norm_plain import Vectors
from arachnec.kernels.rowwise.row_groups import RowGroups
from arachnec.kernels.rowwise.row_launch import Launch, tile_of

LENGTHS = [1, 3, 0, 11]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def groups_of(kind: str) -> RowGroups:
    if kind == "packed":
        return RowGroups(
            sum(LENGTHS), len(LENGTHS), torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
        )
    return {"sample": RowGroups(14, 2), "all": RowGroups(9, 1), "token": RowGroups(6, 6, per_row=True)}[kind]


def eager(x: Tensor, branch: Tensor | None, v: Vectors, groups: RowGroups, layer: bool) -> tuple[Tensor, Tensor]:
    if groups.lengths is None:
        index = torch.arange(groups.rows) // (groups.rows // groups.count)
    else:
        index = torch.repeat_interleave(torch.arange(groups.count), torch.tensor(LENGTHS))
    if branch is not None:
        x = x + branch * (1 if v.gate is None else v.gate[index])
    if layer:
        y = torch.nn.functional.layer_norm(x, x.shape[1:], v.weight, v.bias, 1e-6)
    else:
        y = torch.nn.functional.rms_norm(x, x.shape[1:], v.weight, 1e-6) + (0 if v.bias is None else v.bias)
    y = y * (1 if v.scale is None else 1 + v.scale[index])
    return x, y + (0 if v.shift is None else v.shift[index])


def errors(kind: str, norm: str, vectors: str, gated: bool, hidden: int, dtype: str, slots: int) -> dict[str, float]:
    torch.manual_seed(len(kind) + hidden)
    groups, layer, stored = groups_of(kind), norm == "layer", DTYPES[dtype]

    def drawn(letter: str, *shape: int) -> Tensor | None:
        return torch.randn(shape).to(stored) if letter in vectors else None

    x = torch.randn(groups.rows, hidden).to(stored)
    branch = torch.randn(groups.rows, hidden).to(stored) if gated else None
    wide = [drawn(letter, groups.count, hidden) for letter in "st"]
    gate = drawn("g", groups.count, hidden) if gated else None
    given = Vectors(drawn("w", hidden), drawn("b", hidden), *wide, gate)
    launch = Launch(tile_of(hidden), 1, 1, 255, slots)
    h, y, mean, rstd = norm_launch.forward(x, branch, given, groups, layer, 1e-6, launch)
    dy, dh = torch.randn_like(y), torch.randn_like(h) if gated else None
    gradients = norm_launch.backward(dy, dh, h, mean, rstd, branch, given, groups, layer, True, launch)

    exact = [t if t is None else t.double().requires_grad_() for t in (x, branch, *given)]
    truth_h, truth_y = eager(exact[0], exact[1], Vectors(*exact[2:]), groups, layer)
    torch.autograd.backward([truth_y, truth_h], [dy.double(), torch.zeros_like(truth_h) if dh is None else dh.double()])
    pairs = {"h": (h, truth_h), "y": (y, truth_y)}
    names = ("dx", "dbranch", "dweight", "dbias", "dscale", "dshift", "dgate")
    for name, tensor in zip(names, exact, strict=True):
        if tensor is None or (name == "dshift" and groups.per_row) or (name == "dbranch" and gate is None):
            assert getattr(gradients, name).numel() == 0
        else:
            pairs[name] = (getattr(gradients, name), tensor.grad)
    return {name: float((got.double() - want).abs().max() / want.abs().max()) for name, (got, want) in pairs.items()}


def main(first: int, parts: int) -> dict[str, dict[str, float]]:
    ways = itertools.product(["sample", "token", "packed"], ["layer", "rms"])
    cases = [(kind, norm, "wbstg", True, 40, "fp32", 6) for kind, norm in ways]
    cases += [(kind, "layer", "st", False, 48, dtype, 3) for kind, dtype in (("sample", "fp32"), ("packed", "bf16"))]
    cases += [("packed", "layer", "stg", True, 16, "fp32", 6), ("sample", "layer", "wb", False, 48, "fp32", 3)]
    cases += [
        ("all", "layer", "", False, 48, "fp32", 4),
        ("all", "rms", "w", False, 40, "fp16", 4),
        ("all", "rms", "s", False, 16, "fp32", 4),
        ("all", "layer", "g", True, 7, "fp32", 4),
        ("packed", "rms", "wstg", True, 24, "fp32", 20),
        ("token", "rms", "s", False, 40, "fp32", 4),
    ]
    return {" ".join(map(str, case)): errors(*case) for case in cases[first::parts]}
