"""Sparse attention on several ranks chooses the lists of one, and under them has its loss and gradients."""

from tests.distributed.sequence_cases import Step, compare
from tests.spmd.sequence_models import Size

CLIP, GRID = Size(4, 16, 16, batch=1), (4, 8, 8)


def test_loss_and_every_gradient_equal_those_of_one_process_under_the_same_lists() -> None:
    """Heads of a tenfold density are cut between ranks, in rings of other grids too: chosen keys go to who needs them,
    whatever the grid. So do captions; and predictors' gradients."""
    steps = (
        Step((1, 0), 2, 1, CLIP, grid=GRID),
        Step((2, 0, 3), 3, 1, CLIP, recompute=True, grid=GRID),
        Step((0, 1, 2, 3), 2, 2, CLIP, grid=GRID),
    )
    errors = compare("cogvideox-rotary", steps)
    assert len(errors) == 9
    assert [d for d in errors if d.loss > 1e-6 or d.gradient > 1e-5] == []


def test_ranks_that_get_only_the_keys_they_chose_have_the_loss_and_gradients_of_one_process() -> None:
    """Between machines of one and of two ranks. The lists are chosen from what the others say of their keys; where
    there is no room for keys the objective is no number."""
    steps = (
        Step((1, 0), 2, 1, CLIP, grid=GRID, node=1),
        Step((2, 0, 3), 1, 3, CLIP, grid=GRID, node=1),
        Step((0, 1, 2, 3), 4, 1, CLIP, grid=GRID, node=2),
    )
    errors = compare("wan-3-heads", steps)
    assert len(errors) == 9
    assert [d for d in errors if d.loss > 1e-6 or d.gradient > 1e-5] == []
