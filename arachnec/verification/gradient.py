"""Rule 1: every clip of the global batch contributes to every trained stage's gradient once, with weight 1/N."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator

from arachnec.analysis.uses import Values, rank_list, written
from arachnec.ir.diagnostic import Diagnostic, Mistake
from arachnec.ir.nodes import Cascade, Instruction, Phase, Span
from arachnec.verification.gradient_sync import check_gradient_norm, check_gradient_sync

OPS = {
    Phase.TRAIN: ("forward", "backward"),
    Phase.FORWARD: ("forward",),
    Phase.BACKWARD: ("backward",),
    Phase.WEIGHT: ("weight",),
}
WEIGHT_TOLERANCE = 1e-9


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
                yield Mistake(
                    cascade.span,
                    f"%{cascade.name} trains clip {clip}, which is not in the global batch",
                    kind="unknown clip",
                    label="no such clip",
                    help="name clips of this module, each once",
                )
            seen[cascade.stage][clip].append(cascade)
    for stage, clips in seen.items():
        missing = tuple(sorted(batch - set(clips)))
        if missing:
            yield Mistake(
                values.module.stage(stage).span,
                f"clips {rank_list(missing)} never reach the gradient of @{stage}",
                kind="clip not trained",
                label="trained by no cascade",
                help=f"every clip of the global batch is in exactly one train or forward cascade of @{stage}",
            )
        for clip, cascades in clips.items():
            if len(cascades) > 1:
                names = ", ".join(dict.fromkeys(f"%{cascade.name}" for cascade in cascades))
                yield Mistake(
                    cascades[-1].span,
                    f"clip {clip} reaches the gradient of @{stage} {len(cascades)} times, in {names}",
                    kind="clip trained twice",
                    label="counted again here",
                    help=f"every clip of the global batch is in exactly one train or forward cascade of @{stage}",
                )


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
            count = readers[cascade.name]
            yield Mistake(
                cascade.span,
                f"{count} backward cascades read what `forward %{cascade.name}` saved",
                kind="unmatched forward",
                label=f"read by {count}",
                help=(
                    f"exactly one cascade of phase backward of the same stage and clips has %{cascade.name} as an input"
                ),
            )


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
                yield Mistake(
                    instruction.span,
                    f"rank {program.rank} runs `{written(instruction)}`, and %{cascade.name} is placed on {ranks}",
                    kind="wrong group",
                    label="not the cascade's ranks",
                    help=f"write `on {ranks}`, or place the cascade there",
                )
            if instruction.op == "forward":
                yield from _weight(program.rank, instruction, cascade, total)
    trained = [cascade for cascade in values.module.cascades if cascade.stage in values.trained]
    wanted = dict.fromkeys(
        (op, own.name, rank) for own in trained for op in OPS.get(own.phase, ()) for rank in own.ranks
    )
    for key in dict.fromkeys((*wanted, *counts)):
        op, name, rank = key
        cascade, count, right = values.cascades[name], counts[key], int(key in wanted)
        if count != right:
            yield Mistake(
                spans.get(key, cascade.span),
                f"rank {rank} runs `{op} %{name}` {count} times instead of {right}",
                kind="wrong run count",
                label=f"its ranks are {rank_list(cascade.ranks)}",
                help=f"every rank of a cascade runs its {op} exactly once, and no other rank does",
            )


def _weight(rank: int, instruction: Instruction, cascade: Cascade, total: int) -> Iterator[Diagnostic]:
    right = len(cascade.clips) / total if total else 0.0
    weight = instruction.attrs.get("weight")
    if isinstance(weight, (int, float)) and math.isclose(weight, right, rel_tol=WEIGHT_TOLERANCE):
        return
    shown = "none" if weight is None else f"{weight}"
    clips = len(cascade.clips)
    yield Mistake(
        instruction.span,
        f"rank {rank} runs `{written(instruction)}` with weight {shown}; {clips} of {total} clips weigh {right!r}",
        kind="wrong weight",
        label=f"weight is {shown}",
        help=f"write `weight = {right!r}`",
    )
