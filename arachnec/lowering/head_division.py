"""Which rank of a clip computes which query groups of which head, for the sparse layers of every cascade.

As a placed cascade says, or as its stage's ``division`` divides what its densities weigh.
"""

from __future__ import annotations

from collections.abc import Sequence

from arachnec.cost.sparse_attention import divided
from arachnec.ir.head_density import HeadPart, head_rows, latest_densities, length_class, sparse_layers
from arachnec.ir.nodes import Cascade, Module, Stage
from arachnec.ir.values import Value
from arachnec.sparsity.clip_grid import clip_cubes


def with_heads(module: Module) -> tuple[Cascade, ...]:
    """The cascades, each sparse one on several ranks a clip with its ``heads`` and ``groups``; given ones stay."""
    named, clips = {stage.name: stage for stage in module.stages}, {clip.id: clip for clip in module.clips}
    known: dict[tuple[object, ...], tuple[Value, ...]] = {}
    divided_cascades = []
    for cascade in module.cascades:
        layers = sparse_layers(cascade)
        if not layers or cascade.degree == 1 or "heads" in cascade.attrs:
            divided_cascades.append(cascade)
            continue
        stage = named[cascade.stage]
        groups, _ = clip_cubes(stage, cascade.tokens, clips.get(cascade.clips[0]) if cascade.clips else None)
        length = length_class(cascade.tokens)
        key = cascade.stage, layers, length, groups, cascade.degree
        if key not in known:
            known[key] = _rows(stage, layers, length, groups, cascade.degree)
        divided_cascades.append(cascade.with_attrs(groups=groups, heads=known[key]))
    return tuple(divided_cascades)


def _rows(stage: Stage, layers: Sequence[int], length: int, groups: int, degree: int) -> tuple[Value, ...]:
    latest = latest_densities(stage)
    table = {layer: latest[layer].at(length) for layer in layers}
    parts = {
        layer: tuple(
            HeadPart(share.head, place, share.start, share.stop)
            for place, shares in enumerate(divided(stage, table[layer], groups, degree))
            for share in shares
        )
        for layer in layers
    }
    return head_rows(parts, len(table[layers[0]].heads), groups)
