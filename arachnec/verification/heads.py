"""Rule 1, inside sparse attention: every query group of every head is computed once, by one rank of the clip.

A group that is left out gives its queries no output, one that is computed twice counts twice in the gradients of its
keys. Both show in no shape: the tensors are made whole before they are filled. Of a clip that has another number of
groups a run leaves `heads` aside, and divides heads by number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from arachnec.analysis.uses import Values
from arachnec.cost.sparse_attention import ATTENDS
from arachnec.ir.diagnostic import Diagnostic, Mistake, Span
from arachnec.ir.head_density import sparse_layers
from arachnec.ir.head_division import HeadPart, parts_by_layer
from arachnec.ir.names import label
from arachnec.ir.nodes import Cascade, integer
from arachnec.sparsity.clip_cubes import clip_cubes


@dataclass(frozen=True)
class GroupsNotComputed(Diagnostic):
    title = "no rank of {cascade} computes query groups {first} to {last} of head {head} in layer {layer}"
    label = "has {groups} groups"
    help = "give them to a place in `heads`; a part is head, place, first group, and the end behind the last"
    cascade: str
    first: int
    last: int
    head: int
    layer: int
    groups: int


@dataclass(frozen=True)
class GroupsComputedTwice(Diagnostic):
    title = "{cascade} computes query groups {first} to {last} of head {head} in layer {layer} twice"
    label = "at places {one} and {other}"
    help = "the keys' gradients would count them twice: take them from one of the places"
    cascade: str
    first: int
    last: int
    head: int
    layer: int
    one: int
    other: int


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
    span, name = _span(cascade), label(cascade)
    groups = integer(cascade.attrs["groups"])
    by_head = {
        head: sorted(own, key=lambda part: part.start)
        for head, own in groupby(sorted(parts, key=lambda part: part.head), key=lambda part: part.head)
    }
    for head in range(heads):
        done = owner = 0
        for part in by_head.get(head, []):
            if part.start > done:
                yield GroupsNotComputed(span, name, done, part.start - 1, head, layer, groups)
            elif part.start < done:
                last = min(done, part.stop) - 1
                yield GroupsComputedTwice(span, name, part.start, last, head, layer, owner, part.place)
            if part.stop > done:
                done, owner = part.stop, part.place
        if done < groups:
            yield GroupsNotComputed(span, name, done, groups - 1, head, layer, groups)


def _span(cascade: Cascade) -> Span | None:
    return cascade.attrs.span("heads") or cascade.span
