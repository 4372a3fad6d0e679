"""What a program computes on its ranks is what the reference computes; what no rule sees is seen here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from arachnec.commands.program_file import read_program
from arachnec.equivalence import execution
from arachnec.equivalence.compare import demand_equivalent
from arachnec.equivalence.small_program import small
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Instruction, Module, Program
from arachnec.passes.check import checked

GOLDEN = Path(__file__).parents[1] / "golden" / "check"
Change = Callable[[Sequence[Instruction]], Sequence[Instruction]]


def program(name: str) -> Module:
    return checked(read_program(GOLDEN / f"{name}.cascade"))


@pytest.mark.parametrize("name", ["buckets_valid", "cells_valid", "tied_stages_valid"])
def test_what_check_accepts_computes_the_reference(name: str) -> None:
    agreement = demand_equivalent(program(name))
    assert agreement.worst < 1e-7
    trained = {stage.name for stage in program(name).stages if stage.trained}
    assert {f"@{stage}" for stage in trained} <= set(agreement.by_stage)


def test_a_small_program_keeps_all_instructions_and_different_clips() -> None:
    module = program("updates_gathered_valid")
    reduced = small(module).module
    for own, other in zip(reduced.programs, module.programs, strict=True):
        assert [(i.op, i.target, i.peers) for i in own.instructions] == [
            (i.op, i.target, i.peers) for i in other.instructions
        ]
    lengths = {(a.tokens, b.tokens) for a, b in zip(reduced.clips, module.clips, strict=True)}
    assert len({a for a, _ in lengths}) == len({b for _, b in lengths})
    assert max(a for a, _ in lengths) < 32


def changed(module: Module, rank: int, change: Change) -> Module:
    def of(own: Program) -> Program:
        return replace(own, instructions=tuple(change(own.instructions))) if own.rank == rank else own

    return replace(module, programs=tuple(map(of, module.programs)))


def without_the_rest(steps: Sequence[Instruction]) -> Sequence[Instruction]:
    return [replace(s, attrs=s.attrs.updated(rest=None)) if "rest" in s.attrs else s for s in steps]


def test_a_program_that_check_would_refuse_is_told_by_what_it_computes() -> None:
    module = program("buckets_valid")
    for rank in range(3):
        module = changed(module, rank, without_the_rest)
    with pytest.raises(UserError, match=r"the gradient differs by .* of what lies outside the layers"):
        demand_equivalent(module, seconds=20.0)


def test_a_mistake_of_the_executor_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank counts its clips as one more: ranks inherit it, the reference does not use it."""
    run = execution.run_iteration

    def wrong(context, iteration, *others):  # type: ignore[no-untyped-def]
        share = replace(iteration.share, part=1.01)
        return run(context, replace(iteration, share=share), *others)

    monkeypatch.setattr(execution, "run_iteration", wrong)
    with pytest.raises(UserError, match=r"the loss differs by 1.00% of the whole step"):
        demand_equivalent(program("valid"))


def test_a_program_that_does_not_end_is_told() -> None:
    module = changed(program("valid"), 0, lambda steps: [step for step in steps if step.op != "send"])
    with pytest.raises(UserError, match="does not run to its end"):
        demand_equivalent(module, seconds=8.0)
