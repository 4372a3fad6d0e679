"""Bytes of messages, held against what lowering said of the same stages: as many pass, and fewer do not."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from arachnec.analysis.uses import Values
from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import Diagnostic
from arachnec.ir.nodes import Instruction, Module, Phase, Program, integer
from arachnec.lowering.programs import lower
from arachnec.verification import handoffs
from arachnec.verification.handoffs import GIB, check_message_sizes
from arachnec.verification.memory import RELATIVE, ROUNDING_GIB, handed_sizes
from tests.passes.plans import DIT, cluster, equal_clips, module_of, timed
from tests.verification.test_times import PROGRAMS, valid

CLAIMS = ("receive", "reduce", "gather")
PRINTED = round(ROUNDING_GIB * GIB)  # bytes of what is handed on: plans are written with six places


def with_bytes(module: Module, of: Callable[[int], int]) -> Module:
    """Every message, at both of its ends, with so many bytes instead of those that it has."""

    def changed(step: Instruction) -> Instruction:
        if "bytes" not in step.attrs:
            return step
        return replace(step, attrs=step.attrs.updated(bytes=of(integer(step.attrs["bytes"]))))

    def program(own: Program) -> Program:
        return replace(own, instructions=tuple(map(changed, own.instructions)))

    return replace(module, programs=tuple(map(program, module.programs)))


def told(module: Module) -> list[Diagnostic]:
    values = Values(module)
    problems = list(check_message_sizes(values, handed_sizes(values, CostModel(module))))
    assert all(problem.kind == "too few bytes" for problem in problems), "both ends say the same"
    return problems


def least(problem: Diagnostic) -> int:
    """The bytes that its stage says."""
    return int(problem.message.rsplit(" ", 1)[1])


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_message_has_the_bytes_that_its_stage_says_and_a_hundredth_less_is_refused(name: str) -> None:
    module = valid(name)
    claims = [
        (program.rank, step.op, integer(step.attrs["bytes"]))
        for program in module.programs
        for step in program.instructions
        if step.op in CLAIMS and "tied" not in step.attrs
    ]
    assert claims
    assert not told(module)
    assert not told(with_bytes(module, lambda size: size - 1)), "rounded down"
    assert not told(with_bytes(module, lambda size: size - round(size * RELATIVE / 2)))
    less = told(with_bytes(module, lambda size: max(0, size * 99 // 100 - PRINTED)))
    for problem, (rank, op, size) in zip(less, claims, strict=True):
        given = size - PRINTED if op == "receive" else size
        assert problem.message.startswith(f"rank {rank} has `{op} ")
        assert abs(least(problem) - given) <= (PRINTED / 2 if op == "receive" else 2)


def lowered(buckets: tuple[int, ...] | None, outside: int = 2000, **dealt: int) -> Module:
    """A stage of 1000 and 3000 parameters in two layers and others in none, trained on two pairs of ranks."""
    cascades = [
        timed("a", Phase.TRAIN, 0, 1000, (), (0.0, 10.0), (0, 1)),
        timed("b", Phase.TRAIN, 1, 1000, (), (0.0, 10.0), (2, 3)),
    ]
    module = module_of(cluster(), equal_clips(2), cascades)
    layers = (("blocks.0", 1000), ("blocks.1", 3000))
    stage = replace(DIT, attrs=DIT.attrs.updated(layers=layers, params=4000 + outside, **dealt))
    (node,) = module.reductions
    if buckets is not None:
        node = replace(node, attrs=node.attrs.updated(buckets=buckets))
    return lower(replace(module, stages=(stage,), reductions=(node,)))


@pytest.mark.parametrize("dealt", [{}, {"sharded": 4}, {"cell": 2}, {"cell": 2, "sharded": 2}], ids=str)
@pytest.mark.parametrize("outside", [2000, 0])
@pytest.mark.parametrize(
    ("buckets", "layers"), [(None, [4000]), ((2, 0), [4000, 0]), ((1, 1), [3000, 1000]), ((2,), [4000])]
)
def test_a_share_of_a_layer_is_its_parameters_over_the_cell_and_two_bytes_less_are_refused(
    dealt: dict[str, int],
    buckets: tuple[int, ...] | None,
    layers: list[int],
    outside: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One byte is rounding. Everything is gathered at once where the optimizer is dealt out."""
    module, cell = lowered(buckets, outside, **dealt), dealt.get("cell", 1)
    parameters = [*layers[:-1], layers[-1] + outside]
    right = [4 * sum(parameters) // cell] * ("sharded" in dealt) + [4 * count // cell for count in parameters]
    for program in module.programs:
        assert [integer(step.attrs["bytes"]) for step in program.instructions if "bytes" in step.attrs] == right
    monkeypatch.setattr(handoffs, "RELATIVE", 0.0)
    assert not told(with_bytes(module, lambda size: size - 1))
    assert [least(problem) for problem in told(with_bytes(module, lambda size: size - 2))] == right * 4


def test_a_part_that_several_stages_share_may_be_of_any_size() -> None:
    """Which parameters these are no stage says."""
    module = valid("tied")
    tied = [s for p in module.programs for s in p.instructions if "tied" in s.attrs]
    nothing = with_bytes(module, lambda size: 0)
    assert tied
    assert not any("tied" in problem.message for problem in told(nothing))
    assert len(told(nothing)) == sum(
        step.op in CLAIMS and "tied" not in step.attrs for p in module.programs for step in p.instructions
    )


def test_the_second_message_of_a_kind_is_held_against_the_second_of_the_other_ranks() -> None:
    """Two stages' reduces of one name, of other bytes each: what differs between ranks is told, and nothing else."""
    module = lowered(None)
    (reduce,) = [step for step in module.programs[0].instructions if step.op == "reduce"]
    larger = replace(reduce, attrs=reduce.attrs.updated(bytes=integer(reduce.attrs["bytes"]) + 8))

    def with_reduces(*reduces: Instruction) -> Program:
        others = [step for step in module.programs[1].instructions if step.op != "reduce"]
        return replace(module.programs[1], instructions=(*others, *reduces))

    def unequal(program: Program) -> list[str]:
        own = [replace(program, rank=rank) for rank in (0, 1)]
        own[0] = replace(own[0], instructions=with_reduces(reduce, larger).instructions)
        values = Values(replace(module, programs=tuple(own)))
        problems = check_message_sizes(values, {})
        return [re.sub("`.*`", "it", p.message) for p in problems if p.kind == "unequal bytes"]

    small, large = integer(reduce.attrs["bytes"]), integer(larger.attrs["bytes"])
    assert unequal(with_reduces(reduce, larger)) == []
    more = f"rank 1 has it of {large} bytes, and on rank 0 it has {small}"
    less = f"rank 1 has it of {small} bytes, and on rank 0 it has {large}"
    assert unequal(with_reduces(larger, larger)) == [more]
    assert unequal(with_reduces(reduce, reduce)) == [less]
    assert unequal(with_reduces(larger, reduce)) == [more, less]
