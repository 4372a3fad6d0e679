"""Memory of a cascade: what its ranks share, what each holds whole, and the batch of the next one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from arachnec.analysis.memory import usages
from arachnec.analysis.uses import Values
from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Module, Phase
from arachnec.ir.parser import parse_module
from arachnec.ir.values import Formula, Term
from tests.distributed.executor_cases import Work, clip, lowered, traced

PER_TOKEN, BATCH, SHELL = 1e-6, 1e-5, 4e-7  # GiB


def module(**attrs: Formula) -> Module:
    """A long clip on two ranks, then a short one on the first."""
    plan = lowered(traced(2, [[clip("long", 5), clip("short", 1)]]), [Work((0,), (0, 1), 0.0), Work((1,), (0,), 1.0)])
    stages = tuple(replace(stage, attrs=stage.attrs.updated(**attrs)) for stage in plan.stages)
    return replace(plan, stages=stages)


def per_token(gib: float) -> Formula:
    return Formula((Term(gib, (("B", 1), ("S", 1))),), "GiB")


def test_what_lies_outside_the_blocks_is_whole_on_every_rank() -> None:
    plain, shelled = CostModel(module()), CostModel(module(shell=per_token(SHELL)))
    (long, _) = module().cascades
    assert shelled.memory(long, 1, False) == pytest.approx(plain.memory(long, 1, False))
    more = shelled.memory(long, 2, False) - plain.memory(long, 2, False)
    assert more == pytest.approx(SHELL * long.tokens / 2)


def test_a_batch_is_held_in_use_and_the_next_ones_is_made_while_one_runs() -> None:
    batched = module(batch=per_token(BATCH))
    plain, cost = CostModel(module()), CostModel(batched)
    (long, short) = batched.cascades
    assert cost.memory(long, 2, False) == pytest.approx(plain.memory(long, 2, False) + BATCH * long.tokens)
    assert cost.prepared == pytest.approx(BATCH * long.tokens)
    assert plain.room - cost.room == pytest.approx(cost.prepared)
    values = Values(batched)
    for program, expected in zip(batched.programs, ([short.tokens, 0], [0]), strict=True):
        ahead = [usage.values for usage in usages(values, program)][1:]
        forwards = [ahead[i] for i, step in enumerate(program.instructions) if step.op == "forward"]
        assert forwards == pytest.approx([BATCH * tokens for tokens in expected])


def test_each_side_gets_its_own_of_what_an_earlier_stage_hands_on() -> None:
    place = Path(__file__).parents[1] / "golden" / "place" / "pipeline_1f1b.expect"
    pipeline = parse_module(place.read_text(encoding="utf-8"))
    named = {cascade.name: cascade for cascade in pipeline.cascades}
    later = next(
        cascade
        for cascade in pipeline.cascades
        if cascade.phase is Phase.FORWARD and any(named[name].phase is Phase.FORWARD for name in cascade.inputs)
    )
    memory = CostModel(pipeline)._memory
    assert 0 < memory.received(later, 2) == pytest.approx(memory.received(later) / 2)
