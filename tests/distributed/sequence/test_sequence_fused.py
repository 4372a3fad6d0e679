"""Blocks with fused regions on several ranks, recomputed or not, have the loss and gradients of the model on one."""

from __future__ import annotations

import pytest

from arachnec.kernels.attention.sequence_shard import even_split
from tests.distributed.sequence_cases import Step, compare
from tests.slow import quick
from tests.spmd.sequence_models import MODELS, Size

CLIP = Size(3, 4, 6)
FUSED = ("wan-3-heads", "cogvideox-rotary", "hunyuan-video", "ltx-video", "plain", "convolved", "joined")


@pytest.mark.parametrize("name", quick(FUSED, "hunyuan-video", "plain"))
def test_loss_and_every_gradient_equal_those_of_one_process_without_fusion(name: str) -> None:
    total = MODELS[name].tokens(CLIP)
    steps = (
        Step((0,), 1, 1, CLIP, (total,)),  # whole, and fused
        Step((0, 1), 2, 1, CLIP, even_split(total, 2)),
        Step((1, 2), 1, 2, CLIP, recompute=True),
        Step((0, 1, 2), 3, 1, CLIP, (total - 1, 1, 0)),
    )
    errors = compare(name, steps, fused=True)
    assert len(errors) == 8
    assert [d for d in errors if d.loss > 1e-6 or d.gradient > 1e-5] == []
