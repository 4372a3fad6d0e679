"""What a message says and where a rule ends: counts as they are, tolerances to the last digit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from arachnec.ir.nodes import Instruction, Module, Program, quantity
from arachnec.ir.parser import parse_module
from arachnec.ir.values import Quantity, Value
from arachnec.passes.check import find_problems
from arachnec.verification.gradient import WrongRunCount
from arachnec.verification.gradient_sync import TOLERANCE, WrongStart
from arachnec.verification.times import SLACK_MS, TimeTooLong

GOLDEN = Path(__file__).parents[1] / "golden"
OF_THE_MODEL = ("encode", "forward", "backward", "weight", "gather", "reduce", "norm", "step")


def golden(name: str) -> Module:
    return parse_module((GOLDEN / "check" / f"{name}.cascade").read_text(encoding="utf-8"), name)


def with_steps(module: Module, rank: int, steps: tuple[Instruction, ...]) -> Module:
    programs = (Program(p.rank, steps, p.attrs) if p.rank == rank else p for p in module.programs)
    return replace(module, programs=tuple(programs))


def with_attribute(module: Module, rank: int, at: int, name: str, value: Value) -> Module:
    steps = list(next(p for p in module.programs if p.rank == rank).instructions)
    steps[at] = replace(steps[at], attrs=steps[at].attrs.updated(**{name: value}))
    return with_steps(module, rank, tuple(steps))


def test_a_cascade_on_a_rank_that_is_not_its_own_is_told_with_how_often_it_runs_and_should() -> None:
    module = golden("valid")
    runs = {p.rank: [s for s in p.instructions if s.op in ("forward", "backward")] for p in module.programs}
    rank, steps = next((rank, steps) for rank, steps in runs.items() if steps)
    forward = steps[0]
    other = next(p for p in module.programs if p.rank not in forward.peers)
    for times in (1, 2):
        broken = with_steps(module, other.rank, (replace(forward, peers=(other.rank,)),) * times + other.instructions)
        told = [p for p in find_problems(broken) if isinstance(p, WrongRunCount) and p.rank == other.rank]
        assert [(p.op, p.count, p.right) for p in told] == [("forward", times, 0)]
    own = next(p for p in module.programs if p.rank == rank)
    without = tuple(step for step in own.instructions if step is not forward)
    told = [p for p in find_problems(with_steps(module, rank, without)) if isinstance(p, WrongRunCount)]
    assert (told[0].rank, told[0].count, told[0].right) == (rank, 0, 1)


def test_what_belongs_to_no_stage_takes_no_time_of_its_own() -> None:
    """A message or a free may claim the second that all may, and no more."""
    module = golden("valid")
    seen = set()
    for program in module.programs:
        for at, step in enumerate(program.instructions):
            if step.op in OF_THE_MODEL or step.op in seen:
                continue
            seen.add(step.op)
            problems = find_problems(with_attribute(module, program.rank, at, "time", Quantity(SLACK_MS + 0.5, "ms")))
            told = next(problem for problem in problems if isinstance(problem, TimeTooLong))
            assert (told.right, told.most) == (0.0, SLACK_MS)
    assert seen == {"send", "receive", "free"}


def test_a_bucket_may_start_as_much_before_the_backwards_end_as_rounding_allows() -> None:
    module = golden("buckets_valid")
    program = module.programs[0]
    at = next(n for n, step in enumerate(program.instructions) if "early" in step.attrs)
    backward = [step for step in program.instructions[:at] if step.op == "backward"][-1]
    most = quantity(backward.attrs["time"]) * (1 + TOLERANCE)
    for early, refused in ((most, False), (most * (1 + 1e-9), True), (0.0, False), (-1e-9, True)):
        problems = find_problems(with_attribute(module, program.rank, at, "early", Quantity(early, "ms")))
        assert (WrongStart in map(type, problems)) == refused, early
