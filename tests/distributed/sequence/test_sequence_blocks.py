"""A model on several ranks, each with some of the tokens, has the loss and the gradients of the model on one."""

from __future__ import annotations

import pytest

from arachnec.kernels.attention.sequence_shard import even_split
from tests.distributed.sequence_cases import Step, compare
from tests.slow import quick
from tests.spmd.sequence_models import MODELS, ModelCase, Size

CLIP = Size(3, 4, 6)


def steps(case: ModelCase) -> tuple[Step, ...]:
    """Every degree from 2 to 4, Ulysses, ring and both; some ranks with one token or with none; one and two clips;
    no block recomputed, the first one, and all."""
    caption = even_split(case.tokens(CLIP), 2)[0] if case.text else 7
    as_long = Size(3, 4, 6, caption, 1)  # the caption is exactly as long as a token shard
    total = case.tokens(CLIP)
    return (
        Step((0, 1), 2, 1, as_long, even_split(total, 2), recompute=1),
        Step((1, 2), 1, 2, as_long, even_split(total, 2), recompute=1),
        Step((0, 2, 3), 3, 1, CLIP),
        Step((3, 1, 0), 1, 3, CLIP, recompute=True),
        Step((0, 1, 2, 3), 2, 2, CLIP, recompute=1),
        Step((0, 1, 2, 3), 4, 1, CLIP, (total - 2, 1, 1, 0)),
        Step((0, 1, 2, 3), 1, 4, CLIP, even_split(total, 4)),
    )


QUICK = ("factorised-by-shell", "wan-3-heads", "joined")


@pytest.mark.parametrize("name", quick(list(MODELS), *QUICK))
def test_loss_and_every_gradient_equal_those_of_one_process(name: str) -> None:
    errors = compare(name, steps(MODELS[name]))
    assert len(errors) == sum(len(step.ranks) for step in steps(MODELS[name]))
    assert [d for d in errors if d.loss > 1e-6 or d.gradient > 1e-5] == []
