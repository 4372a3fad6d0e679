"""When predictors learn: often enough to become sparse, seldom enough to cost little, and layers in turn."""

from __future__ import annotations

from itertools import pairwise

from arachnec.sparsity.head_shares import DENSE_EVERY, FIRST, SPARSE_EVERY, learns


def test_a_dense_layer_learns_in_each_of_the_first_steps_and_then_in_some() -> None:
    assert all(learns(layer, step, False) for layer in range(40) for step in range(FIRST))
    later = [step for step in range(FIRST, FIRST + 10 * DENSE_EVERY) if learns(3, step, False)]
    assert len(later) == 10 and {b - a for a, b in pairwise(later)} == {DENSE_EVERY}


def test_a_sparse_layer_learns_in_every_eighth_step_and_steps_have_equally_many() -> None:
    for step in (0, 1, 2, 3, FIRST, 10 * FIRST + 3):
        assert sum(learns(layer, step, True) for layer in range(32)) == 32 / SPARSE_EVERY
    assert [step for step in range(20) if learns(1, step, True)] == [7, 15]
