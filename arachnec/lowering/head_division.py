"""Which rank of a clip computes which query groups of which head, for the sparse layers of every cascade.

As a placed cascade says, or as its stage's ``division`` divides what its densities weigh.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from arachnec.cost.sparse_attention import divided
from arachnec.ir.head_density import LayerDensity, group_count, layer_densities, sparse_layers
from arachnec.ir.head_division import HeadPart, head_rows
from arachnec.ir.nodes import Cascade, Stage
from arachnec.ir.values import Value


def with_heads(cascades: Sequence[Cascade], stages: Sequence[Stage]) -> tuple[Cascade, ...]:
    """The cascades, each sparse one on several ranks a clip with its ``heads`` and ``groups``; given ones stay."""
    named = {stage.name: stage for stage in stages}
    known: dict[tuple[object, ...], tuple[Value, ...]] = {}
    divided_cascades = []
    for cascade in cascades:
        layers = sparse_layers(cascade)
        if not layers or cascade.degree == 1 or "heads" in cascade.attrs:
            divided_cascades.append(cascade)
            continue
        stage = named[cascade.stage]
        groups = group_count(stage, cascade.tokens)
        key = cascade.stage, layers, groups, cascade.degree
        if key not in known:
            known[key] = _rows(stage, layers, groups, cascade.degree)
        divided_cascades.append(cascade.with_attrs(groups=groups, heads=known[key]))
    return tuple(divided_cascades)


def _rows(stage: Stage, layers: Sequence[int], groups: int, degree: int) -> tuple[Value, ...]:
    table: Mapping[int, LayerDensity] = layer_densities(stage)
    parts = {
        layer: tuple(
            HeadPart(share.head, place, share.start, share.stop)
            for place, shares in enumerate(divided(stage, table[layer], groups, degree))
            for share in shares
        )
        for layer in layers
    }
    return head_rows(parts, len(table[layers[0]].heads), groups)
