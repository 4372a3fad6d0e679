"""Micro-batches that fill cells: every clip once, numbers that a cell can run side by side, none above its limit."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from arachnec.ir.nodes import Clip
from arachnec.planning.cell_batches import cell_batches, counts


@given(st.integers(1, 300), st.sampled_from((1, 2, 3, 4, 6, 8, 16, 64)), st.floats(0.1, 100))
def test_numbers_of_clips_divide_the_cell_or_fill_it_several_times(clips: int, cell: int, limit: float) -> None:
    counted = list(counts(clips, cell, limit))
    assert sum(counted) == clips
    for count in counted:
        assert cell % count == 0 or count % cell == 0
        assert count <= max(1, math.floor(limit + 1e-9))


@given(st.lists(st.sampled_from((17, 33, 49)), min_size=1, max_size=60), st.sampled_from((2, 4, 8)))
def test_every_clip_is_in_one_micro_batch_with_clips_of_its_shape(frames: list[int], cell: int) -> None:
    clips = [Clip(number, length, 256, 256, 0, 100 * length) for number, length in enumerate(frames)]
    batches = cell_batches(clips, cell, lambda clip: 8.0)
    assert sorted(clip.id for batch in batches for clip in batch) == list(range(len(clips)))
    assert all(len({clip.frames for clip in batch}) == 1 for batch in batches)


def test_eleven_clips_on_a_cell_of_eight_are_eight_two_and_one() -> None:
    assert list(counts(11, 8, 100.0)) == [8, 2, 1]
