"""Where the all-reduce of what stages share, and the norm of all gradients, may stand in a rank's list: every place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from arachnec.analysis.uses import Values
from arachnec.ir.nodes import Instruction, Module, Span
from arachnec.ir.parser import parse_file
from arachnec.verification.gradient_sync import check_gradient_norm

GOLDEN = Path(__file__).parents[1] / "golden" / "check" / "tied_stages_valid.cascade"
WHOLE = GOLDEN.with_name("valid.cascade")  # every rank has all gradients of its one stage
Steps = tuple[Instruction, ...]


def moved(module: Module, rank: int, at: int) -> Iterator[tuple[Steps, Steps, set[str]]]:
    """An instruction at every place among its rank's others: those before it and behind it, and what is found wrong."""
    program = next(program for program in module.programs if program.rank == rank)
    step, others = program.instructions[at], (*program.instructions[:at], *program.instructions[at + 1 :])
    for place in range(len(others) + 1):
        own = replace(program, instructions=(*others[:place], step, *others[place:]))
        programs = tuple(own if one.rank == rank else one for one in module.programs)
        problems = check_gradient_norm(Values(replace(module, programs=programs)))
        yield others[:place], others[place:], {problem.kind for problem in problems}


def any_of(steps: Steps, *ops: str) -> bool:
    return any(step.op in ops for step in steps)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_stages_share_is_reduced_behind_the_last_backward(rank: int) -> None:
    module = parse_file(GOLDEN)
    steps = next(program for program in module.programs if program.rank == rank).instructions
    assert sum(step.op == "backward" for step in steps) > 1, "the first is not the last"
    places = moved(module, rank, next(at for at, step in enumerate(steps) if "tied" in step.attrs))
    early = [(any_of(behind, "backward"), "tied not reduced" in problems) for _, behind, problems in places]
    assert set(early) == {(True, True), (False, False)}


@pytest.mark.parametrize("rank", [0, 1])
def test_the_norm_of_all_gradients_stands_between_the_last_reduce_and_the_first_step(rank: int) -> None:
    module = parse_file(GOLDEN)
    steps = next(program for program in module.programs if program.rank == rank).instructions
    at = next(at for at, step in enumerate(steps) if step.op == "norm")
    misplaced = [
        (any_of(behind, "reduce") or any_of(before, "step"), "norm not summed" in problems)
        for before, behind, problems in moved(module, rank, at)
    ]
    assert set(misplaced) == {(True, True), (False, False)}


def instructions_of(module: Module, rank: int) -> Steps:
    return next(program for program in module.programs if program.rank == rank).instructions


def with_steps(module: Module, rank: int, steps: Steps) -> Module:
    programs = (replace(one, instructions=steps) if one.rank == rank else one for one in module.programs)
    return replace(module, programs=tuple(programs))


def without(steps: Steps, *ops: str) -> Steps:
    return tuple(step for step in steps if step.op not in ops)


def at(line: int) -> Span:
    return Span("here", line, 1, line, 2)


def told(module: Module, rank: int) -> list[tuple[str, str, Span | None]]:
    problems = check_gradient_norm(Values(module))
    return [
        (problem.kind, problem.label, problem.span)
        for problem in problems
        if problem.kind in ("norm not summed", "tied not reduced") and f"rank {rank}" in problem.message
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_has_no_backward_may_begin_with_what_stages_share(rank: int) -> None:
    """The reduce of what is shared is its first instruction, or the one behind a forward."""
    module = parse_file(GOLDEN)
    steps = without(instructions_of(module, rank), "backward")
    shared = next(step for step in steps if "tied" in step.attrs)
    ends = tuple(step for step in steps if step.op in ("reduce", "norm", "step") and step is not shared)
    forward = next(step for step in steps if step.op == "forward")
    for own in ((shared, *ends), (forward, shared, *ends)):
        assert told(with_steps(module, rank, own), rank) == []
    backward = next(step for step in instructions_of(module, rank) if step.op == "backward")
    for op in ("backward", "weight"):
        behind = with_steps(module, rank, (shared, replace(backward, op=op), *ends))
        assert told(behind, rank) == [("tied not reduced", "a backward comes after the reduce", shared.span)]


@pytest.mark.parametrize("times", [0, 1, 2, 3])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_norm_of_gradients_on_several_ranks_is_summed_once(rank: int, times: int) -> None:
    """It is told at the second one, and at the program where there is none."""
    module = parse_file(GOLDEN)
    steps = instructions_of(module, rank)
    place, norm = next((n, step) for n, step in enumerate(steps) if step.op == "norm")
    norms = tuple(replace(norm, span=at(number)) for number in range(times))
    program = next(program for program in module.programs if program.rank == rank)
    right = [("norm not summed", f"it is summed {times} times", at(1) if times else program.span)]
    changed = with_steps(module, rank, (*steps[:place], *norms, *steps[place + 1 :]))
    assert told(changed, rank) == (right if times != 1 else [])


@pytest.mark.parametrize("times", [0, 1, 2])
def test_a_rank_that_has_all_gradients_itself_sums_no_norm(times: int) -> None:
    """It is told at the first one."""
    module = parse_file(WHOLE)
    steps = instructions_of(module, 0)
    place, step = next((n, step) for n, step in enumerate(steps) if step.op == "step")
    norms = tuple(Instruction("norm", step.target, (0,), span=at(number)) for number in range(times))
    right = [("norm not summed", "this rank has all gradients itself", at(0))]
    changed = with_steps(module, 0, (*steps[:place], *norms, *steps[place:]))
    assert told(changed, 0) == (right if times else [])


def test_a_norm_over_other_ranks_or_at_another_place_is_told_there() -> None:
    module = parse_file(GOLDEN)
    steps = instructions_of(module, 0)
    norm = next(step for step in steps if step.op == "norm")
    others, other = without(steps, "norm"), replace(norm, peers=(0,), span=at(7))
    moved = replace(norm, span=at(8))
    for own, reason, span in (
        ((*others[:-1], other, others[-1]), "it is summed over ranks [0]", at(7)),
        ((*others[:-2], moved, *others[-2:]), "a reduce comes after it", at(8)),
        ((*others, moved), "a step comes before it", at(8)),
    ):
        assert told(with_steps(module, 0, own), 0) == [("norm not summed", reason, span)]


def test_what_stages_share_is_reduced_once_over_all_of_their_ranks() -> None:
    module = parse_file(GOLDEN)
    steps = instructions_of(module, 0)
    program = next(program for program in module.programs if program.rank == 0)
    place, shared = next((n, step) for n, step in enumerate(steps) if "tied" in step.attrs)

    def problems(*reduces: Instruction) -> list[tuple[str, str, Span | None]]:
        return told(with_steps(module, 0, (*steps[:place], *reduces, *steps[place + 1 :])), 0)

    one, second = replace(shared, span=at(1)), replace(shared, span=at(2))
    nothing = replace(shared, attrs=shared.attrs.updated(tied=(0, 2)), span=at(3))
    assert problems(one) == []
    assert problems() == [("tied not reduced", "it takes part in 0 reduces", program.span)]
    assert problems(one, second) == [("tied not reduced", "it takes part in 2 reduces", program.span)]
    assert problems(replace(one, peers=(0,))) == [("tied not reduced", "it is over ranks [0]", at(1))]
    unknown = ("tied not reduced", "they share nothing that lies on different ranks", at(3))
    assert problems(one, nothing) == [unknown]
