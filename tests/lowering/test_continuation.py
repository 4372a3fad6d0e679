"""How a program that goes on begins: as the one before it, up to where it was planned again."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from arachnec.ir.nodes import Instruction, Module, quantity
from arachnec.ir.values import Attributes, Quantity
from arachnec.lowering.continuation import beginning, begins_as, continued
from arachnec.lowering.order import global_order
from arachnec.lowering.programs import lower
from arachnec.passes.check import checked
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.planning.sampling.requests import SwitchForecast
from tests.planning.test_replanning import PIPELINE, rounds_of
from tests.planning.test_sampling_plan import SHAPES, request, traced


def test_a_list_begins_up_to_the_replan_of_its_round() -> None:
    steps = [Instruction("replan", "m", (), Attributes.of(round=number)) for number in (1, 2, 3)]
    denoise = Instruction("denoise", "a", (), Attributes.of(round=2))
    whole = [steps[0], denoise, steps[1], denoise, steps[2]]
    assert beginning(whole, 1) == (steps[0],)
    assert beginning(whole, 2) == (steps[0], denoise, steps[1])
    assert begins_as(whole, [steps[0], denoise, steps[1]], 2)
    assert not begins_as(whole, [steps[0], steps[1]], 2)


@pytest.fixture(scope="module")
def sampled() -> Module:
    """Three requests on two ranks, in three rounds: what is later by a third of the plan each."""
    rows = [request(n, SHAPES[n % 2], steps=9) for n in range(3)]
    module = Pipeline.parse(PIPELINE.format("search")).run(traced(rows, [SwitchForecast(0, 9, 0)] * 3, gpus=2))
    order = global_order(module.cascades)
    thirds = [c.with_attrs(round=3 * place // len(order) or None) for place, c in enumerate(order)]
    assert rounds_of(replace(module, cascades=tuple(thirds))) == 2
    return checked(lower(replace(module, cascades=tuple(thirds))))


def test_a_plan_that_goes_on_as_it_was_is_the_same_plan(sampled: Module) -> None:
    """Every cascade once, on the same ranks, and every rank holds what it held and frees each value once."""
    for round in range(1, rounds_of(sampled) + 1):
        again = checked(continued(sampled, round, [c for c in sampled.cascades if c.round >= round]))
        assert sorted(c.name for c in again.cascades) == sorted(c.name for c in sampled.cascades)
        assert {c.name: c for c in again.cascades} == {c.name: c for c in sampled.cascades}
        for before, after in zip(sampled.programs, again.programs, strict=True):
            assert begins_as(after.instructions, before.instructions, round)
            assert after.attrs == before.attrs
            assert Counter(map(done, after.instructions)) == Counter(map(done, before.instructions)), round


def done(step: Instruction) -> tuple[str, str, tuple[int, ...]]:
    return step.op, step.target, step.peers


def test_what_nothing_reads_any_more_is_freed_where_the_round_begins(sampled: Module) -> None:
    """Of the last round nothing is left: all values end right behind its ``replan``, and nothing runs there."""
    last = rounds_of(sampled)
    ended = continued(sampled, last, [])
    assert [c.name for c in ended.cascades] == [c.name for c in sampled.cascades if c.round < last]
    for before, after in zip(sampled.programs, ended.programs, strict=True):
        begun = beginning(before.instructions, last)
        left = Counter(s.target for s in begun if s.op in ("encode", "denoise", "decode", "receive"))
        left.subtract(s.target for s in begun if s.op == "free")
        rest = after.instructions[len(begun) :]
        assert Counter(done(step) for step in rest) == Counter(("free", name, ()) for name in +left)


def test_what_ran_has_its_new_times_in_the_lists(sampled: Module) -> None:
    later = [
        c.with_attrs(start=Quantity(c.start + 7.0, "ms"), end=Quantity(c.end + 9.0, "ms")) for c in sampled.cascades
    ]
    times = {c.name: (c.start, c.end - c.start) for c in later}
    again = continued(replace(sampled, cascades=tuple(later)), 1, [c for c in later if c.round >= 1])
    steps = [step for program in again.programs for step in beginning(program.instructions, 1) if "start" in step.attrs]
    assert steps
    for step in steps:
        assert (quantity(step.attrs["start"]), quantity(step.attrs["time"])) == pytest.approx(times[step.target])
