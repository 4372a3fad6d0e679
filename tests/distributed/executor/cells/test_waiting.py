"""Gradients of cells are done when every sum is: of what lies in cells, of what lies whole, and of who took part."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from arachnec.model_state.cells.gradients import ShardGradients, _Started


def shards_done(whole: bool, *pending: bool) -> bool:
    sums: Any = SimpleNamespace(
        whole=SimpleNamespace(done=whole), _pending=[SimpleNamespace(done=done) for done in pending]
    )
    return ShardGradients.done.fget(sums)  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("sums", list(product([False, True], repeat=3)))
def test_all_sums_have_to_be_there(sums: tuple[bool, bool, bool]) -> None:
    assert shards_done(*sums) is all(sums)
    assert shards_done(sums[0]) is sums[0]


@pytest.mark.parametrize("pieces", list(product([False, True], repeat=2)))
@pytest.mark.parametrize("told", [None, False, True])
def test_a_sum_is_there_with_all_pieces_and_the_count_of_those_that_took_part(
    told: bool | None, pieces: tuple[bool, bool]
) -> None:
    work: Any = None if told is None else SimpleNamespace(is_completed=lambda: told)
    sent: Any = [SimpleNamespace(done=done) for done in pieces]
    started = _Started([], [], sent, torch.zeros(0, dtype=torch.int32), work)
    assert started.done is (told is not False and all(pieces))
