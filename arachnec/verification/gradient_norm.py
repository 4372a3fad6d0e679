"""Rule 1, of gradients that no rank has all of: what stages share is all-reduced, and all are clipped by one norm."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from arachnec.analysis.gradient_ranks import Ranks, norm_ranks, tied_ranks
from arachnec.analysis.uses import Values, rank_list
from arachnec.ir.diagnostic import Diagnostic
from arachnec.ir.nodes import Instruction, Program, integers
from arachnec.ir.stage_sizes import tied_sets


@dataclass(frozen=True)
class TiedNotReduced(Diagnostic):
    title = "the gradient of what stages {tied} share is not all-reduced on rank {rank}: {reason}"
    label = "{reason}"
    help = (
        "after the last backward of these stages, each of their ranks takes part in one `reduce` on {ranks} with "
        "`tied = {tied}`"
    )
    rank: int
    tied: str
    reason: str
    ranks: str


@dataclass(frozen=True)
class NormNotSummed(Diagnostic):
    title = "rank {rank} clips the gradients of @{stage} by a norm that is not that of all: {reason}"
    label = "{reason}"
    help = "between its last `reduce` and its first `step`, every rank has one `norm` on {ranks}"
    rank: int
    stage: str
    reason: str
    ranks: str


def check_gradient_norm(values: Values) -> Iterator[Diagnostic]:
    places = _places(values)
    stages = values.module.stages
    tied = {pair[0] for stage in stages for pair in tied_sets(stage.attrs.get("tied"))}
    groups = {parts: ranks for parts in sorted(tied) if (ranks := tied_ranks(parts, stages, places))}
    for program in values.module.programs:
        yield from _tied(values, program, groups)
        yield from _norm(values, program, places)


def _places(values: Values) -> dict[str, set[int]]:
    """The ranks of every trained stage: those of its all-reduces."""
    places: dict[str, set[int]] = defaultdict(set)
    for program in values.module.programs:
        for step in program.instructions:
            if step.op == "reduce" and "tied" not in step.attrs and step.target in values.trained:
                places[step.target].update(step.peers)
    return places


def _tied(values: Values, program: Program, groups: Mapping[Ranks, Ranks]) -> Iterator[TiedNotReduced]:
    steps = program.instructions
    reduces = [(at, step) for at, step in enumerate(steps) if step.op == "reduce" and "tied" in step.attrs]
    last = max((at for at, step in enumerate(steps) if step.op in ("backward", "weight")), default=0)
    for at, step in reduces:
        parts = integers(step.attrs["tied"])
        ranks = groups.get(parts)
        if ranks is None:
            reason = "they share nothing that lies on different ranks"
        elif step.peers != ranks:
            reason = f"it is over ranks {rank_list(step.peers)}"
        elif at < last:
            reason = "a backward comes after the reduce"
        else:
            continue
        yield TiedNotReduced(step.span, program.rank, rank_list(parts), reason, rank_list(ranks or ()))
    for parts, ranks in groups.items():
        count = sum(integers(step.attrs["tied"]) == parts for _, step in reduces)
        if program.rank in ranks and count != 1:
            reason = f"it takes part in {count} reduces"
            yield TiedNotReduced(program.span, program.rank, rank_list(parts), reason, rank_list(ranks))


def _norm(values: Values, program: Program, places: Mapping[str, set[int]]) -> Iterator[NormNotSummed]:
    steps, stages = program.instructions, values.module.stages
    for stage in stages:
        if program.rank not in places.get(stage.name, ()):
            continue
        expected = norm_ranks(stage, program.rank, stages, places)
        norms = [at for at, step in enumerate(steps) if step.op == "norm" and _clips(values, step, stage.name)]
        reason, at = _reason(steps, norms, expected)
        if reason:
            span = program.span if at is None else steps[at].span
            yield NormNotSummed(span, program.rank, stage.name, reason, rank_list(expected))


def _reason(steps: tuple[Instruction, ...], norms: list[int], expected: Ranks) -> tuple[str, int | None]:
    """What is wrong with the norms by which a stage's gradients are clipped, and where; empty where nothing is."""
    if not expected:
        return ("this rank has all gradients itself", norms[0]) if norms else ("", None)
    if len(norms) != 1:
        return f"it is summed {len(norms)} times", norms[1] if norms else None
    (at,) = norms
    if steps[at].peers != expected:
        return f"it is summed over ranks {rank_list(steps[at].peers)}", at
    if any(step.op == "reduce" for step in steps[at:]):
        return "a reduce comes after it", at
    if any(step.op == "step" for step in steps[:at]):
        return "a step comes before it", at
    return "", None


def _clips(values: Values, norm: Instruction, stage: str) -> bool:
    """Whether a norm is that of the gradients of a stage: its own, or its model's."""
    target, own = values.module.stage(norm.target), values.module.stage(stage)
    return target.attrs.get("part_of", target.name) == own.attrs.get("part_of", own.name)
