"""Layouts of tensors over a grid of ranks."""

import math

import pytest

from arachnec.spmd.spatial.layout import Factor, Layout, even_bounds, viewed, whole

CUT = (Factor(4, 0, even_bounds(4, 2)),)


@pytest.mark.parametrize("shape", [(0,), (4, 0), (4, 0, 5), (0, 7), (4, 3, 0), (2, 2, 0)])
def test_a_tensor_without_entries_can_be_viewed_as_any_other_without(shape: tuple[int, ...]) -> None:
    """Every rank's part of it can be, too, and a leading dimension that stays keeps its cut."""
    layout = Layout((CUT, whole(0), whole(3)), (2,))
    result = viewed(layout, shape)
    assert result.shape == shape
    assert (result.axes == {0}) == (shape[0] == 4)
    assert all(math.prod(result.local_shape(index)) == 0 for index in range(2))
