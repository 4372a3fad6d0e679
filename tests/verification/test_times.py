"""A plan's times are at most what its formulas say, twice and a second more: a run's patience rests on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from arachnec.analysis.uses import Values
from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Instruction, Module, Program, Quantity, quantity
from arachnec.ir.parser import parse_module
from arachnec.passes.check import find_problems
from arachnec.verification.times import SLACK_MS, StartsTooLate, TimeTooLong, check_times
from tests.passes.plans import linear

GOLDEN = Path(__file__).parents[1] / "golden"
PROGRAMS = {
    "whole": "check/buckets_valid.expect",
    "cells": "check/cells_valid.expect",
    "host": "check/host_valid.expect",
    "stages": "lower/pipeline_zero_bubble.expect",
    "tied": "check/tied_stages_valid.expect",
    "gathers": "check/updates_gathered_valid.expect",
    "sampling": "check/two_model_sampling.expect",
    "sparse": "check/heads_valid.expect",
}


def valid(name: str) -> Module:
    return parse_module((GOLDEN / PROGRAMS[name]).read_text(encoding="utf-8"), name)


def with_claim(module: Module, rank: int, at: int, name: str, ms: float) -> Module:
    """One instruction claims so many ms."""

    def changed(program: Program) -> Program:
        steps = list(program.instructions)
        steps[at] = replace(steps[at], attrs=steps[at].attrs.updated(**{name: Quantity(ms, "ms")}))
        return replace(program, instructions=tuple(steps))

    return replace(module, programs=tuple(changed(p) if p.rank == rank else p for p in module.programs))


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_instruction_may_claim_more_time_than_its_formulas_give_it(name: str) -> None:
    """Of every kind of instruction the last of its rank, so that nothing else is broken."""
    module = valid(name)
    assert not find_problems(module)
    kinds = {step.op: (p.rank, at, step) for p in module.programs for at, step in enumerate(p.instructions)}
    for rank, at, step in kinds.values():
        claimed = quantity(step.attrs["time"]) if "time" in step.attrs else 0.0
        longer = find_problems(with_claim(module, rank, at, "time", 1e6 + claimed))
        assert TimeTooLong in map(type, longer), step
        told = next(problem for problem in longer if isinstance(problem, TimeTooLong))
        assert told.most == 2 * told.right + 1000
        for ms, refused in ((told.most, False), (told.most + 1e-6, True)):
            problems = find_problems(with_claim(module, rank, at, "time", ms))
            assert (TimeTooLong in map(type, problems)) == refused, step


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_starts_when_all_work_in_turn_would_have_ended(name: str) -> None:
    module = valid(name)
    rank, at = next((p.rank, n) for p in module.programs for n, s in enumerate(p.instructions) if "start" in s.attrs)
    late = find_problems(with_claim(module, rank, at, "start", 1e9))
    told = next(problem for problem in late if isinstance(problem, StartsTooLate))
    assert told.most == 2 * told.total + 1000
    assert told.total >= max(c.end - c.start for c in module.cascades) / 2
    for ms, refused in ((told.most, False), (told.most + 1e-6, True)):
        problems = find_problems(with_claim(module, rank, at, "start", ms))
        assert (StartsTooLate in map(type, problems)) == refused


def test_nothing_runs_before_the_last_request_has_come_so_that_is_waited_for() -> None:
    """The latest arrival of all requests counts, whichever it is."""
    module = valid("sampling")
    rank, at = next((p.rank, n) for p in module.programs for n, s in enumerate(p.instructions) if "start" in s.attrs)

    def total(arrivals: list[float]) -> float:
        coming = zip(module.clips, arrivals, strict=True)
        clips = tuple(replace(clip, attrs=clip.attrs.updated(arrival=Quantity(ms, "ms"))) for clip, ms in coming)
        problems = find_problems(with_claim(replace(module, clips=clips), rank, at, "start", 1e9))
        return next(problem for problem in problems if isinstance(problem, StartsTooLate)).total

    count = len(module.clips)
    assert count > 1
    at_once = total([0.0] * count)
    for last in range(count):
        arrivals = [100.0 + 10 * (number == last) for number in range(count)]
        assert total(arrivals) == pytest.approx(at_once + 110)
    nothing = with_claim(replace(module, clips=()), rank, at, "start", 1e9)
    (told,) = [p for p in check_times(Values(nothing), CostModel(nothing)) if isinstance(p, StartsTooLate)]
    assert told.total == at_once


def test_where_a_stage_has_no_formula_nothing_is_compared() -> None:
    module = valid("whole")
    bare = tuple(replace(stage, attrs=stage.attrs.updated(forward=None, backward=None)) for stage in module.stages)
    rank, at = next((p.rank, n) for p in module.programs for n, s in enumerate(p.instructions) if s.op == "backward")
    claimed = with_claim(replace(module, stages=bare), rank, at, "time", 1e9)
    assert TimeTooLong not in map(type, find_problems(claimed))


def test_anything_may_claim_a_second_whatever_its_formulas_give_it() -> None:
    """Less than nothing, too."""
    module = valid("whole")
    less = tuple(replace(stage, attrs=stage.attrs.updated(forward=linear(-1.0, "ms"))) for stage in module.stages)
    module = replace(module, stages=less)
    rank, at = next((p.rank, n) for p in module.programs for n, s in enumerate(p.instructions) if s.op == "forward")
    for ms, refused in ((SLACK_MS, False), (SLACK_MS + 1e-6, True)):
        claimed = with_claim(module, rank, at, "time", ms)
        problems = check_times(Values(claimed), CostModel(claimed))
        assert any(isinstance(one, TimeTooLong) and one.rank == rank for one in problems) == refused


@pytest.mark.parametrize("known", ["forward", "backward"])
def test_half_a_formula_is_none_of_a_train_cascade(known: str) -> None:
    module = valid("whole")
    half = {"forward": None, "backward": None} | {known: linear(1.0, "ms")}
    stages = tuple(replace(stage, attrs=stage.attrs.updated(**half)) for stage in module.stages)
    for op in ("forward", "backward"):
        rank, at = next((p.rank, n) for p in module.programs for n, s in enumerate(p.instructions) if s.op == op)
        claimed = with_claim(replace(module, stages=stages), rank, at, "time", 1e9)
        assert TimeTooLong not in map(type, check_times(Values(claimed), CostModel(claimed)))


def test_a_new_round_takes_no_time_of_its_own() -> None:
    module = valid("sampling")
    step = Instruction("replan", module.stages[0].name)
    program = replace(module.programs[0], instructions=(step,))
    claimed = with_claim(replace(module, programs=(program,)), program.rank, 0, "time", SLACK_MS + 0.5)
    (told,) = [p for p in check_times(Values(claimed), CostModel(claimed)) if isinstance(p, TimeTooLong)]
    assert (told.right, told.most) == (0.0, SLACK_MS)
