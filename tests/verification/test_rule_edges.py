"""What a message says and where a rule ends: counts as they are, tolerances to the last digit."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from arachnec.analysis.communicators import HOST_HANDOFFS
from arachnec.analysis.uses import Values, written
from arachnec.ir.diagnostic import counted
from arachnec.ir.nodes import Cascade, Instruction, Module, Phase, Program, Stage, quantity
from arachnec.ir.parser import parse_module
from arachnec.ir.values import Attributes, Quantity, Value
from arachnec.passes.check import find_problems
from arachnec.verification import sparse as sparse_paths
from arachnec.verification.encoders import check_encoders
from arachnec.verification.gradient_sync import TOLERANCE, check_gradient_sync
from arachnec.verification.memory import TOLERANCE_GIB as MEMORY_TOLERANCE
from arachnec.verification.memory import check_memory
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
        told = [
            p
            for p in find_problems(broken)
            if p.kind == "wrong run count" and p.message.startswith(f"rank {other.rank} ")
        ]
        assert [f"`forward %{forward.target}` {times} times instead of 0" in p.message for p in told] == [True]
    own = next(p for p in module.programs if p.rank == rank)
    without = tuple(step for step in own.instructions if step is not forward)
    told = [p for p in find_problems(with_steps(module, rank, without)) if p.kind == "wrong run count"]
    assert told[0].message == f"rank {rank} runs `forward %{forward.target}` 0 times instead of 1"


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
        assert ("wrong start" in {one.kind for one in problems}) == refused, early


def test_a_plan_that_is_too_large_is_told_where_it_holds_most_or_for_its_parameters_alone() -> None:
    """A device may be full to the last digit."""
    module = golden("valid")
    assert module.cluster is not None
    attrs = module.cluster.attrs.updated(device="cpu")  # which has no communicators
    module = replace(module, cluster=replace(module.cluster, attrs=attrs))
    assert module.cluster is not None
    limit = module.cluster.memory + MEMORY_TOLERANCE
    largest = Instruction("denoise", "t0", (0,), Attributes.of(workspace=Quantity(100.0, "GiB")))

    def told(gib: float, *steps: Instruction) -> list[str]:
        own = Program(0, steps, Attributes.of(state=Quantity(gib, "GiB")))
        problems = check_memory(Values(replace(module, programs=(own,))), HOST_HANDOFFS)
        return [problem.message.split("`")[1] for problem in problems if problem.kind == "out of memory"]

    assert told(limit) == []
    assert told(math.nextafter(limit, 99.0)) == ["its parameters alone"]
    small = replace(largest, attrs=Attributes())
    assert told(0.0, small) == []
    assert told(0.0, largest, small) == told(0.0, small, largest) == [written(largest)]
    assert told(99.0, small) == ["its parameters alone"]


@pytest.mark.parametrize("cell", [None, 2])
def test_an_encoder_is_shared_as_far_as_it_divides_or_its_batch_has_clips_and_lies_on_its_cell(
    cell: int | None,
) -> None:
    """One that names no ranks runs on its own alone."""
    for divides in (None, 1, 2):
        stage = Stage("vae", False, Attributes.of(divides=divides, tensor_parallel=cell))
        for batch, ranks in ((1, ()), (1, (0,)), (1, (0, 1)), (2, (0, 1)), (2, (0, 1, 2))):
            cascade = Cascade("e", Phase.ENCODE, "vae", (0,), batch, 4, 0)
            programs = (Program(0, (Instruction("encode", "e", ranks),)),)
            module = replace(golden("valid"), stages=(stage,), cascades=(cascade,), programs=programs)
            told = list(check_encoders(Values(module)))
            if cell is not None:
                others = [one.label for one in told if one.kind == "other cell"]
                right = f"on {counted(len(ranks) or 1, 'rank')}"
                assert others == ([] if ranks == (0, 1) else [right]) and len(told) == len(others)
            else:
                shared = divides is not None and max(len(ranks), 1) > max(divides, batch)
                assert [one.kind for one in told] == ["shared too far"] * shared


@pytest.mark.parametrize(("sparse", "faster"), [((1,), (0,)), ((0,), (1,)), ((), (0, 1)), ((0, 1), ()), ((0,), (0, 1))])
def test_the_first_layer_that_takes_the_slower_path_is_told_with_its_paths(
    monkeypatch: pytest.MonkeyPatch, sparse: tuple[int, ...], faster: tuple[int, ...]
) -> None:
    monkeypatch.setattr(sparse_paths, "faster_sparse", lambda stage, tokens, text: faster)
    module = golden("heads_valid")
    cascade = module.cascades[0].with_attrs(sparse=sparse or None, heads=None)
    (told,) = sparse_paths.check_sparse_paths(Values(replace(module, cascades=(cascade,))))
    assert told.kind == "other path"
    first = min({*sparse} ^ {*faster})
    path, right = ("sparse", "dense") if first in sparse else ("dense", "sparse")
    assert f"has layer {first} {path}, which takes less time {right}" in told.message


def test_a_backward_on_the_first_place_of_a_list_is_one() -> None:
    """What starts inside it has a backward to start in, and a reduce above it comes too early."""
    module = golden("buckets_valid")
    program = module.programs[0]
    backward = [step for step in program.instructions if step.op == "backward"][-1]
    ends = program.instructions[program.instructions.index(backward) + 1 :]
    ends = tuple(step for step in ends if step.op in ("reduce", "step"))
    assert any("early" in step.attrs for step in ends)

    def told(*steps: Instruction) -> set[tuple[str, str]]:
        problems = check_gradient_sync(Values(with_steps(module, program.rank, steps)))
        own = (
            one
            for one in problems
            if one.kind in ("wrong start", "not reduced") and f"rank {program.rank} " in one.message
        )
        return {(one.kind, one.label) for one in own}

    assert told(backward, *ends) == set()
    assert told(*ends) == {("wrong start", "this rank has no backward of the stage")}
    assert ("not reduced", "a backward comes after the reduce") in told(*ends, backward)
    assert told(ends[-1], backward, *ends[:-1]) == set()
