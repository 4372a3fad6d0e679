"""Rule 1: every clip of the global batch contributes to every trained stage's gradient once, with weight 1/N."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from arachnec.analysis.uses import Values, rank_list, written
from arachnec.ir.diagnostic import Diagnostic
from arachnec.ir.nodes import Cascade, Instruction, Phase, Span
from arachnec.verification.gradient_sync import check_gradient_norm, check_gradient_sync

OPS = {
    Phase.TRAIN: ("forward", "backward"),
    Phase.FORWARD: ("forward",),
    Phase.BACKWARD: ("backward",),
    Phase.WEIGHT: ("weight",),
}
WEIGHT_TOLERANCE = 1e-9


@dataclass(frozen=True)
class ClipNotTrained(Diagnostic):
    title = "clips {clips} never reach the gradient of @{stage}"
    label = "trained by no cascade"
    help = "every clip of the global batch is in exactly one train or forward cascade of @{stage}"
    clips: str
    stage: str


@dataclass(frozen=True)
class ClipTrainedTwice(Diagnostic):
    title = "clip {clip} reaches the gradient of @{stage} {count} times, in {cascades}"
    label = "counted again here"
    help = "every clip of the global batch is in exactly one train or forward cascade of @{stage}"
    clip: int
    stage: str
    count: int
    cascades: str


@dataclass(frozen=True)
class UnknownClip(Diagnostic):
    title = "%{cascade} trains clip {clip}, which is not in the global batch"
    label = "no such clip"
    help = "name clips of this module, each once"
    cascade: str
    clip: int


@dataclass(frozen=True)
class WrongWeight(Diagnostic):
    title = "rank {rank} runs `{instruction}` with weight {weight}; {clips} of {total} clips weigh {right}"
    label = "weight is {weight}"
    help = "write `weight = {right}`"
    rank: int
    instruction: str
    weight: str
    clips: int
    total: int
    right: str


@dataclass(frozen=True)
class WrongRunCount(Diagnostic):
    title = "rank {rank} runs `{op} %{cascade}` {count} times instead of {right}"
    label = "its ranks are {ranks}"
    help = "every rank of a cascade runs its {op} exactly once, and no other rank does"
    rank: int
    op: str
    cascade: str
    count: int
    right: int
    ranks: str


@dataclass(frozen=True)
class WrongGroup(Diagnostic):
    title = "rank {rank} runs `{instruction}`, and %{cascade} is placed on {ranks}"
    label = "not the cascade's ranks"
    help = "write `on {ranks}`, or place the cascade there"
    rank: int
    instruction: str
    cascade: str
    ranks: str


@dataclass(frozen=True)
class UnmatchedForward(Diagnostic):
    title = "{count} backward cascades read what `forward %{cascade}` saved"
    label = "read by {count}"
    help = "exactly one cascade of phase backward of the same stage and clips has %{cascade} as an input"
    cascade: str
    count: int


def check_gradient(values: Values) -> Iterator[Diagnostic]:
    yield from _clips(values)
    yield from _pairs(values)
    yield from _runs(values)
    yield from check_gradient_sync(values)
    yield from check_gradient_norm(values)


def _clips(values: Values) -> Iterator[Diagnostic]:
    batch = {clip.id for clip in values.module.clips}
    seen: dict[str, dict[int, list[Cascade]]] = {name: defaultdict(list) for name in sorted(values.trained)}
    for cascade in values.module.cascades:
        if cascade.phase not in (Phase.TRAIN, Phase.FORWARD) or cascade.stage not in seen:
            continue
        for clip in cascade.clips:
            if clip not in batch:
                yield UnknownClip(cascade.span, cascade.name, clip)
            seen[cascade.stage][clip].append(cascade)
    for stage, clips in seen.items():
        missing = tuple(sorted(batch - set(clips)))
        if missing:
            yield ClipNotTrained(values.module.stage(stage).span, rank_list(missing), stage)
        for clip, cascades in clips.items():
            if len(cascades) > 1:
                names = ", ".join(dict.fromkeys(f"%{cascade.name}" for cascade in cascades))
                yield ClipTrainedTwice(cascades[-1].span, clip, stage, len(cascades), names)


def _pairs(values: Values) -> Iterator[Diagnostic]:
    """A forward of a pipeline has its own backward."""
    readers: Counter[str] = Counter()
    for cascade in values.module.cascades:
        if cascade.phase is not Phase.BACKWARD:
            continue
        for name in cascade.inputs:
            source = values.cascades.get(name)
            if source and source.stage == cascade.stage and sorted(source.clips) == sorted(cascade.clips):
                readers[name] += 1
    for cascade in values.module.cascades:
        if cascade.phase is Phase.FORWARD and cascade.stage in values.trained and readers[cascade.name] != 1:
            yield UnmatchedForward(cascade.span, cascade.name, readers[cascade.name])


def _runs(values: Values) -> Iterator[Diagnostic]:
    """Every rank of a cascade's group runs it exactly once, as that group, with the clips' weight."""
    total = len(values.module.clips)
    counts: Counter[tuple[str, str, int]] = Counter()
    spans: dict[tuple[str, str, int], Span | None] = {}
    for program in values.module.programs:
        for instruction in program.instructions:
            cascade = values.cascades.get(instruction.target)
            if cascade is None or cascade.stage not in values.trained:
                continue
            if instruction.op not in OPS.get(cascade.phase, ()):
                continue
            key = (instruction.op, cascade.name, program.rank)
            counts[key] += 1
            spans[key] = instruction.span
            if instruction.peers != cascade.ranks:
                ranks = rank_list(cascade.ranks)
                yield WrongGroup(instruction.span, program.rank, written(instruction), cascade.name, ranks)
            if instruction.op == "forward":
                yield from _weight(program.rank, instruction, cascade, total)
    for cascade in values.module.cascades:
        if cascade.stage not in values.trained:
            continue
        for op in OPS.get(cascade.phase, ()):
            for rank in cascade.ranks:
                key = (op, cascade.name, rank)
                count = counts.pop(key, 0)
                if count != 1:
                    ranks = rank_list(cascade.ranks)
                    yield WrongRunCount(spans.get(key, cascade.span), rank, op, cascade.name, count, 1, ranks)
    for key, count in counts.items():
        op, name, rank = key
        yield WrongRunCount(spans[key], rank, op, name, count, 0, rank_list(values.cascades[name].ranks))


def _weight(rank: int, instruction: Instruction, cascade: Cascade, total: int) -> Iterator[Diagnostic]:
    right = len(cascade.clips) / total if total else 0.0
    weight = instruction.attrs.get("weight")
    if isinstance(weight, (int, float)) and math.isclose(weight, right, rel_tol=WEIGHT_TOLERANCE):
        return
    shown = "none" if weight is None else f"{weight}"
    clips = len(cascade.clips)
    yield WrongWeight(instruction.span, rank, written(instruction), shown, clips, total, repr(right))
