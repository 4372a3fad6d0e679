"""Stratified batches: every clip once, batches of equal size, each with its share of every shape, few multisets."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from arachnec.data.stratified import stratified

SHAPES = st.lists(st.tuples(st.integers(1, 5)), min_size=1, max_size=60)


@given(SHAPES, st.integers(1, 12), st.integers(0, 3))
def test_every_batch_has_its_share_of_every_shape(shapes: list[tuple[int, ...]], batches: int, seed: int) -> None:
    dealt = stratified(shapes, batches, random.Random(seed))
    assert sorted(place for batch in dealt for place in batch) == list(range(len(shapes)))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1
    counts = [Counter(shapes[place] for place in batch) for batch in dealt]
    for shape, total in Counter(shapes).items():
        assert all(total // batches <= count[shape] <= -(-total // batches) for count in counts)
    assert len({frozenset(count.items()) for count in counts}) <= len(set(shapes)) + 1


def test_clips_of_one_shape_come_in_an_order_of_the_generators() -> None:
    shapes = [(1,)] * 20
    assert stratified(shapes, 4, random.Random(0)) == stratified(shapes, 4, random.Random(0))
    assert stratified(shapes, 4, random.Random(0)) != stratified(shapes, 4, random.Random(1))
