"""What a cascade measures of a layer does not depend on how many heads are measured at a time, nor on which clips are
in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, fields

import pytest
import torch
from torch import Tensor

from arachnec.kernels.attention.divided_heads import HeadShare
from arachnec.kernels.sparse.predictor import initial_projections
from arachnec.kernels.sparse.token_cubes import token_cubes
from arachnec.spmd import sparse_layers
from arachnec.spmd.sparse_block import Site
from arachnec.spmd.sparse_layers import LayerState, Measured, SparseCascade

HEADS, SIZE, GRID = 3, 16, (3, 6, 7)


CUBES = token_cubes(GRID, queries=32, keys=8, cell=4)
# Of the second head the first two groups alone are computed here, as on a rank that has a part of it.
CUT = (HeadShare(0), HeadShare(1, CUBES.order[: int(CUBES.groups[2])].sort().values, 0, 2), HeadShare(2))
WHOLE = tuple(map(HeadShare, range(HEADS)))


def measured(clips: Sequence[int] = (0, 1), shares: tuple[HeadShare, ...] = WHOLE) -> Measured:
    """Of these clips in one batch."""
    rng = torch.Generator().manual_seed(0)
    by = initial_projections(HEADS, SIZE, SIZE, 4, rng)
    state = LayerState(Site(0, HEADS, SIZE, None), by, (0.5,) * HEADS, (0.2, 0.5, 0.9), sparse=True)
    draws = tuple(f"0/0/{clip}" for clip in clips)
    cascade = SparseCascade({("block", 0): state}, GRID, draws, weight=1.0, sizes=(32, 8, 4))
    heads = [torch.randn(4, HEADS, 126, SIZE, generator=rng)[list(clips)] * 2 for _ in range(3)]
    cascade.of_block("block").attend(0, *heads, None, SIZE**-0.5, shares)
    return cascade.measured["block", 0]


@pytest.mark.parametrize("shares", [WHOLE, CUT])
def test_clips_in_one_batch_are_measured_as_each_alone(shares: tuple[HeadShare, ...]) -> None:
    """So the mean over a batch is that of its clips, and no plan that batches them otherwise learns anything else."""
    assert len({int(n) for n in CUBES.groups.diff()}) > 1, "groups of several sizes are drawn"
    together, alone = measured(range(4), shares), [measured((clip,), shares) for clip in range(4)]
    assert len({tuple(own.needed.tolist()) for own in alone}) > 1
    for field in fields(Measured):
        mine, theirs = (getattr(of, field.name) for of in (together, alone[0]))
        if field.name == "heads":
            assert mine == theirs
            continue
        every = zip(*(values(getattr(own, field.name)) for own in alone), strict=True)
        for value, own in zip(values(mine), every, strict=True):
            torch.testing.assert_close(value, torch.stack(own).mean(0), rtol=1e-5, atol=1e-6)


def values(of: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return of if isinstance(of, tuple) else (of,)


def test_heads_are_measured_alike_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    together = measured()
    monkeypatch.setattr(sparse_layers, "SCORES", 1)
    for one, other in zip(astuple(measured()), astuple(together), strict=True):
        for mine, theirs in zip(one, other, strict=True):
            if isinstance(mine, Tensor):
                torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)
            else:
                assert mine == theirs
