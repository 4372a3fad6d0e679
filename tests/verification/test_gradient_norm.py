"""Where the all-reduce of what stages share, and the norm of all gradients, may stand in a rank's list: every place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from arachnec.analysis.uses import Values
from arachnec.ir.nodes import Instruction, Module
from arachnec.ir.parser import parse_file
from arachnec.verification.gradient_norm import NormNotSummed, TiedNotReduced, check_gradient_norm

GOLDEN = Path(__file__).parents[1] / "golden" / "check" / "tied_stages_valid.cascade"
Steps = tuple[Instruction, ...]


def moved(module: Module, rank: int, at: int) -> Iterator[tuple[Steps, Steps, set[type]]]:
    """An instruction at every place among its rank's others: those before it and behind it, and what is found wrong."""
    program = next(program for program in module.programs if program.rank == rank)
    step, others = program.instructions[at], (*program.instructions[:at], *program.instructions[at + 1 :])
    for place in range(len(others) + 1):
        own = replace(program, instructions=(*others[:place], step, *others[place:]))
        programs = tuple(own if one.rank == rank else one for one in module.programs)
        problems = check_gradient_norm(Values(replace(module, programs=programs)))
        yield others[:place], others[place:], set(map(type, problems))


def any_of(steps: Steps, *ops: str) -> bool:
    return any(step.op in ops for step in steps)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_stages_share_is_reduced_behind_the_last_backward(rank: int) -> None:
    module = parse_file(GOLDEN)
    steps = next(program for program in module.programs if program.rank == rank).instructions
    assert sum(step.op == "backward" for step in steps) > 1, "the first is not the last"
    places = moved(module, rank, next(at for at, step in enumerate(steps) if "tied" in step.attrs))
    early = [(any_of(behind, "backward"), TiedNotReduced in problems) for _, behind, problems in places]
    assert set(early) == {(True, True), (False, False)}


@pytest.mark.parametrize("rank", [0, 1])
def test_the_norm_of_all_gradients_stands_between_the_last_reduce_and_the_first_step(rank: int) -> None:
    module = parse_file(GOLDEN)
    steps = next(program for program in module.programs if program.rank == rank).instructions
    at = next(at for at, step in enumerate(steps) if step.op == "norm")
    misplaced = [
        (any_of(behind, "reduce") or any_of(before, "step"), NormNotSummed in problems)
        for before, behind, problems in moved(module, rank, at)
    ]
    assert set(misplaced) == {(True, True), (False, False)}
