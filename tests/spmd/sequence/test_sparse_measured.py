"""What a cascade measures of a layer does not depend on how many heads are measured at a time."""

from __future__ import annotations

from dataclasses import astuple

import pytest
import torch
from torch import Tensor

from arachnec.kernels.attention.divided_heads import HeadShare
from arachnec.kernels.sparse.predictor import initial_projections
from arachnec.spmd import sparse_layers
from arachnec.spmd.sparse_block import Site
from arachnec.spmd.sparse_layers import LayerState, Measured, SparseCascade

HEADS, SIZE, GRID = 3, 16, (3, 6, 7)


def measured() -> Measured:
    rng = torch.Generator().manual_seed(0)
    by = initial_projections(HEADS, SIZE, SIZE, 4, rng)
    state = LayerState(Site(0, HEADS, SIZE, None), by, (0.5,) * HEADS, (0.2, 0.5, 0.9), sparse=True)
    cascade = SparseCascade({("block", 0): state}, GRID, "0/0/clip", weight=1.0, sizes=(32, 8, 4))
    heads = [torch.randn(2, HEADS, 126, SIZE, generator=rng) for _ in range(3)]
    cascade.of_block("block").attend(0, *heads, None, SIZE**-0.5, tuple(map(HeadShare, range(HEADS))))
    return cascade.measured["block", 0]


def test_heads_are_measured_alike_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    together = measured()
    monkeypatch.setattr(sparse_layers, "SCORES", 1)
    for one, other in zip(astuple(measured()), astuple(together), strict=True):
        for mine, theirs in zip(one, other, strict=True):
            if isinstance(mine, Tensor):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
            else:
                assert mine == theirs
