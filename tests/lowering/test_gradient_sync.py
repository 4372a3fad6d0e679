"""What is summed: buckets that make up a stage's layers, and parameters that stages share, with their bytes."""

from __future__ import annotations

import pytest

from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Stage
from arachnec.ir.values import Attributes
from arachnec.lowering.gradient_sync import _buckets
from tests.distributed.executor_cases import clip
from tests.distributed.pipeline_cases import pipeline_of, planned

STAGE = Stage("dit", True, Attributes.of(params=40, layers=tuple((f"blocks.{n}", 10) for n in range(4))))


@pytest.mark.parametrize("counts", [(4,), (1, 3), (1, 1, 2), (2, 2, 0), (4, 0)])
def test_buckets_of_all_layers_may_end_with_one_of_no_layer(counts: tuple[int, ...]) -> None:
    assert len(_buckets(STAGE, counts)) >= len([count for count in counts if count])


@pytest.mark.parametrize("counts", [(), (3,), (5,), (0, 4), (2, 0, 2), (5, -1), (2, 3, -1), (-1, 5)])
def test_other_counts_are_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(UserError):
        _buckets(STAGE, counts)


def test_what_two_stages_share_is_summed_with_its_bytes() -> None:
    """48 parameters of the first and last layer and 12 of the last two, 8 bytes each; a stage has the last two."""
    program = planned(2, [clip("a", 1), clip("b", 2)], pipeline_of("p=2", "schedule=1f1b"))
    shared = {
        (step.target, step.peers, step.attrs["bytes"])
        for rank in program.programs
        for step in rank.instructions
        if step.op == "reduce" and "tied" in step.attrs
    }
    assert shared == {("dit_0", (0, 1), 48 * 8)}, "by the first of them"
