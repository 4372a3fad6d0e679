"""Sparse attention: every query group computed once, the faster path on all ranks, predictors alike everywhere.

None of these shows in a shape. A group that is left out gives its queries no output, one that is computed twice counts
twice in the gradients of its keys. Both ways of attending give a tensor of the same shape. A rank that learns otherwise
chooses keys by other predictors in the next step. Of a clip that has another number of groups a run leaves `heads`
aside, and divides heads by number.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from arachnec.analysis.uses import Values, rank_list, written
from arachnec.cost.sparse_attention import ATTENDS, faster_sparse
from arachnec.ir.diagnostic import Diagnostic, Mistake, Span, counted
from arachnec.ir.head_density import HeadPart, parts_by_layer, predictor_bytes, sparse_layers, sparse_stages
from arachnec.ir.names import label
from arachnec.ir.nodes import Cascade, Program, integer
from arachnec.sparsity.clip_grid import clip_cubes


def _not_computed(cascade: Cascade, layer: int, head: int, first: int, end: int) -> Mistake:
    return Mistake(
        _span(cascade),
        f"no rank of {label(cascade)} computes query groups {first} to {end - 1} of head {head} in layer {layer}",
        kind="groups not computed",
        label=f"has {integer(cascade.attrs['groups'])} groups",
        help="give them to a place in `heads`; a part is head, place, first group, and the end behind the last",
    )


def check_heads(values: Values) -> Iterator[Diagnostic]:
    clips = {clip.id: clip for clip in values.module.clips}
    for cascade in values.module.cascades:
        if not sparse_layers(cascade) or cascade.phase not in ATTENDS:
            continue
        if "heads" not in cascade.attrs:
            if cascade.degree > 1:
                yield Mistake(
                    cascade.span,
                    f"{label(cascade)} is sparse on {cascade.degree} ranks, and does not say which of them computes "
                    "which heads",
                    kind="heads not divided",
                    label="has no `heads`",
                    help="lower the placed module again: `lower` divides the heads",
                )
            continue
        groups, clip = integer(cascade.attrs["groups"]), clips.get(cascade.clips[0]) if cascade.clips else None
        of_clip, _ = clip_cubes(values.module.stage(cascade.stage), cascade.tokens, clip)
        if groups != of_clip:
            yield Mistake(
                cascade.attrs.span("groups"),
                f"{label(cascade)} divides its heads by {groups} query groups, and its clip has {of_clip}",
                kind="other groups",
                label="does not follow from the clip's size and the stage's `query_group`",
                help="leave `heads` and `groups` out of the placed module: `lower` divides the heads",
            )
            continue
        counts = _head_counts(cascade)
        for layer, parts in parts_by_layer(cascade).items():
            yield from _layer(cascade, layer, parts, counts[layer])


def _head_counts(cascade: Cascade) -> dict[int, int]:
    rows = cascade.attrs["heads"]
    assert isinstance(rows, tuple)
    return {layer: len(row[1]) for row in rows for layer in row[0]}  # type: ignore[index, arg-type, misc, union-attr]


def _layer(cascade: Cascade, layer: int, parts: tuple[HeadPart, ...], heads: int) -> Iterator[Diagnostic]:
    groups = integer(cascade.attrs["groups"])
    by_head = {
        head: sorted(own, key=lambda part: part.start)
        for head, own in groupby(sorted(parts, key=lambda part: part.head), key=lambda part: part.head)
    }
    for head in range(heads):
        done = owner = 0
        for part in by_head.get(head, []):
            if part.start > done:
                yield _not_computed(cascade, layer, head, done, part.start)
            elif part.start < done:
                last = min(done, part.stop) - 1
                yield Mistake(
                    _span(cascade),
                    f"{label(cascade)} computes query groups {part.start} to {last} of head {head} in layer "
                    f"{layer} twice",
                    kind="groups computed twice",
                    label=f"at places {owner} and {part.place}",
                    help="the keys' gradients would count them twice: take them from one of the places",
                )
            if part.stop > done:
                done, owner = part.stop, part.place
        if done < groups:
            yield _not_computed(cascade, layer, head, done, groups)


def _span(cascade: Cascade) -> Span | None:
    return cascade.attrs.span("heads") or cascade.span


BEFORE = ("reduce", "norm", "step", "backward", "weight")


def check_learning(values: Values) -> Iterator[Diagnostic]:
    """One ``learn`` on every rank, of all ranks and of the first stage with predictors; none where there are none."""
    learning, cluster = list(sparse_stages(values.module).values()), values.module.cluster
    assert cluster is not None
    everyone = tuple(range(cluster.world))
    remedy = "no layer of this module has a `density`: take `learn` out"
    if learning:
        remedy = f"behind its last `step` every rank has one `learn @{learning[0].name}` on {rank_list(everyone)}"
        if not any(step.op == "learn" for program in values.module.programs for step in program.instructions):
            remedy += ". An older version wrote programs without it: compile again"
    for program in values.module.programs:
        at = [index for index, step in enumerate(program.instructions) if step.op == "learn"]
        if len(at) != bool(learning):
            span = program.instructions[at[-1]].span if at else program.span
            yield _not_learned(span, program.rank, f"it learns {counted(len(at), 'time')}", remedy)
        elif at:
            yield from _learn(program, at[0], learning[0].name, everyone, predictor_bytes(learning), remedy)


def _learn(
    program: Program, at: int, stage: str, everyone: tuple[int, ...], size: int, remedy: str
) -> Iterator[Mistake]:
    step = program.instructions[at]
    if step.target != stage or step.peers != everyone:
        yield _not_learned(step.span, program.rank, f"it has `{written(step)}`", remedy)
    if step.attrs.get("bytes") != size:
        remedy = f"give it `bytes = {size}`, four for each of the `predictors` of the stages"
        yield _not_learned(step.span, program.rank, "the bytes are not those of all predictors", remedy)
    if any(later.op in BEFORE for later in program.instructions[at:]):
        yield _not_learned(step.span, program.rank, "a gradient or an update comes after it", remedy)


def _not_learned(span: Span | None, rank: int, reason: str, remedy: str) -> Mistake:
    title = f"rank {rank} does not learn which keys matter as the others do: {reason}"
    return Mistake(span, title, kind="not learned", label=reason, help=remedy)


def check_sparse_paths(values: Values) -> Iterator[Diagnostic]:
    faster: dict[tuple[str, int, int], frozenset[int]] = {}
    stages = {stage.name: stage for stage in values.module.stages}
    for cascade in values.module.cascades:
        if cascade.phase not in ATTENDS:
            continue
        key = cascade.stage, cascade.tokens, cascade.text
        if key not in faster:
            faster[key] = frozenset(faster_sparse(stages[cascade.stage], cascade.tokens, cascade.text))
        others = faster[key].symmetric_difference(sparse_layers(cascade))
        if others:
            layer = min(others)
            path, right = ("dense", "sparse") if layer in faster[key] else ("sparse", "dense")
            span = cascade.attrs.span("sparse") or cascade.span
            yield Mistake(
                span,
                f"{label(cascade)} has layer {layer} {path}, which takes less time {right} by the times and "
                f"densities of @{cascade.stage}",
                kind="other path",
                label=f"layer {layer} is {path}",
                help="plan again: `annotate` chooses the sparse layers of every length, the same in every plan",
            )
