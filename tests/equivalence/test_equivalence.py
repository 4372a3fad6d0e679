"""What a program computes on its ranks is what the reference computes; what no rule sees is seen here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from arachnec.commands.program_file import read_program
from arachnec.driver import plan_iteration, plan_model
from arachnec.equivalence import execution
from arachnec.equivalence.compare import demand_equivalent
from arachnec.equivalence.small_program import small
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Instruction, Module, Program, integer
from arachnec.ir.parser import parse_module
from arachnec.ir.values import Attributes
from arachnec.ir.verify import verify
from arachnec.passes.check import checked, find_problems
from arachnec.passes.infra.pipeline import Pipeline
from tests.distributed.executor_cases import clip
from tests.distributed.pipeline_cases import partly_trained, pipeline_of, traced

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


def listed(op: str, target: str, **lists: tuple[int, ...]) -> Change:
    """Other lists of layers on one instruction."""

    def change(steps: Sequence[Instruction]) -> Sequence[Instruction]:
        return [
            replace(step, attrs=step.attrs.updated(**lists)) if (step.op, step.target) == (op, target) else step
            for step in steps
        ]

    return change


def swapped(first: tuple[str, str], second: tuple[str, str]) -> Change:
    def change(steps: Sequence[Instruction]) -> Sequence[Instruction]:
        steps = list(steps)
        a, b = (next(n for n, s in enumerate(steps) if (s.op, s.target) == one) for one in (first, second))
        steps[a], steps[b] = steps[b], steps[a]
        return steps

    return change


def staged() -> Module:
    return checked(read_program(GOLDEN.parent / "schedule_pipeline" / "stages_in_cells.expect"))


def broken_program(kind: str) -> Module:
    if kind == "dropped gather":
        return changed(program("cells_valid"), 0, listed("forward", "0", gather=(3, 0, 2)))
    if kind == "moved release":  # what lies in no block goes with the forward, and the backward reads it again
        module = program("cells_valid")
        for rank in (0, 1):
            module = changed(module, rank, listed("forward", "0", release=(3, 0, 1, 2)))
            module = changed(module, rank, listed("backward", "0", release=(0, 1, 2)))
        return module
    if kind == "swapped backwards":  # one member of a cell runs another micro-batch than the other
        return changed(staged(), 0, swapped(("backward", "4"), ("backward", "10")))
    return changed(staged(), 0, swapped(("send", "0"), ("backward", "4")))


@pytest.mark.parametrize("kind", ["dropped gather", "moved release", "swapped backwards", "swapped send"])
def test_what_check_refuses_of_cells_and_stages_hangs_aborts_or_computes_something_else(kind: str) -> None:
    """On gloo ranks, past ``check``: so that the rules are not stricter than what happens."""
    module = broken_program(kind)
    assert find_problems(module)
    with pytest.raises(UserError, match=r"does not (compute what|run to its end)"):
        demand_equivalent(module, seconds=8.0)


# stands on rank 2 as well, below
ON_RANK_1 = "forward %t0 on [1, 2] { time = 16 ms, start = 4 ms, memory = 40 GiB, weight = 0.5"
WITHOUT_CLIP_1 = {
    "send %e1": "// ", "receive %e1": "// ", "encode %e1 {": "// ", "free %e1": "// ", "%e1 = encode": "// ",
    "forward %t1": "// ", "backward %t1": "// ", "%t1 = train": "// ",
    "reduce @dit (%t0, %t1)": "reduce @dit (%t0)", "weight = 0.5": "weight = 1.0",
}  # fmt: skip
REDUCED = "\n    reduce @dit on [0..2] { bytes = 4000000, time = 1 ms }"
STEPPED = "\n    step @dit { time = 1 ms }"
BROKEN_TEXTS = {
    # ranks of a forward that split it in other ways
    "ulysses and ring on one rank": {ON_RANK_1: f"{ON_RANK_1}, ulysses = 1, ring = 2"},
    "shards on one rank": {ON_RANK_1: f"{ON_RANK_1}, shards = [32760, 0]"},
    "recompute on one rank": {ON_RANK_1: f"{ON_RANK_1}, recompute = true"},
    "another clip's encode": {"text 64 (%e1)": "text 64 (%e0)"},
    "no encode": {"text 64 (%e1)": "text 64", "send %e1": "// ", "receive %e1": "// "},
    "a clip gone": WITHOUT_CLIP_1,
    "an idle rank left out": {
        **WITHOUT_CLIP_1,
        "clip 1 :": "// ",
        f"free %e1\n    free %e0{REDUCED}{STEPPED}": "free %e1\n    free %e0",  # rank 0
        "reduce @dit on [0..2]": "reduce @dit on [1, 2]",
    },
}


@pytest.mark.parametrize("kind", BROKEN_TEXTS)
def test_what_check_refuses_of_splits_encodes_clips_and_ranks_hangs_aborts_or_computes_something_else(
    kind: str,
) -> None:
    text = (GOLDEN / "valid.cascade").read_text(encoding="utf-8")
    for old, new in BROKEN_TEXTS[kind].items():
        assert old in text, old
        text = text.replace(old, f"{new}{old}" if new == "// " else new, 1 if old == ON_RANK_1 else -1)
    seen_not_to_run(parse_module(text))


@pytest.mark.parametrize("name", ["collectives_in_two_orders", "buckets_in_two_orders"])
def test_collectives_in_two_orders_hang_or_abort(name: str) -> None:
    seen_not_to_run(read_program(GOLDEN / f"{name}.cascade"))


def seen_not_to_run(module: Module) -> None:
    assert not verify(module)
    assert find_problems(module)
    with pytest.raises(UserError, match=r"does not (compute what|run to its end)"):
        demand_equivalent(module, seconds=5.0)


@pytest.mark.parametrize("schedule", ["schedule=1f1b", "schedule=zb-h1"])
def test_a_frozen_first_stage_has_frozen_embeddings_though_the_head_trains(schedule: str) -> None:
    whole = traced(2, [[clip("a", 2), clip("b", 3), clip("c", 4)]])
    dit = partly_trained(whole.stages[0], ["second"])
    ends = Attributes.of(end_params=((84, 0), (24, 24)), trained=24 + integer(dit.attrs["trained"]))
    dit = replace(dit, attrs=dit.attrs.updated(**dict(ends)))
    pipeline = Pipeline.parse(pipeline_of("p=2", schedule))
    model, _ = plan_model(replace(whole, stages=(dit,)), pipeline)
    module, _ = plan_iteration(model, pipeline, 0)
    assert [stage.trained for stage in module.stages] == [False, True]
    assert demand_equivalent(module).worst < 1e-7
