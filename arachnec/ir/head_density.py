"""Sparse attention in a module. In: the attributes ``density`` and ``heads``. Out: densities by layer, parts of heads.

A class of length is named by the fewest tokens of its clips, a power of two, and has those up to the next; the last has
all longer ones too. It follows from the clip alone, so it is the same in every plan. A row of ``heads`` is ``[layers,
place of each head, parts]``. A place is a number into the ranks of a clip, -1 for a head that is cut; of these the
parts follow, four numbers each: head, place, first group, and the group behind the last.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from arachnec.ir.nodes import Cascade, Module, Stage, integer, integers
from arachnec.ir.stage_sizes import count_in, layers_of
from arachnec.ir.values import Value

LENGTH_CLASSES = tuple(1 << power for power in range(21))

Heads: TypeAlias = tuple[float, ...]


def length_class(tokens: int) -> int:
    """Of a clip of so many tokens."""
    return min(1 << (max(1, tokens).bit_length() - 1), LENGTH_CLASSES[-1])


@dataclass(frozen=True)
class ByLength:
    """A value for each head: over clips of all lengths, and of the classes that have their own, ascending."""

    heads: Heads
    classes: tuple[tuple[int, Heads], ...] = ()

    def at(self, tokens: int) -> Heads:
        """For clips of so many tokens: those of all lengths where their class has none of its own."""
        return dict(self.classes).get(length_class(tokens), self.heads)


@dataclass(frozen=True)
class LayerDensity:
    """Of one layer. A layer that lists none attends to all keys."""

    share: float  # of the pairs of tokens that all attentions of the stage compute
    heads: Heads  # for each head the share of keys that a query attends to
    classes: tuple[tuple[int, Heads], ...] = ()  # the same of clips of these classes of length

    @classmethod
    def of(cls, share: float, densities: ByLength) -> LayerDensity:
        return cls(share, densities.heads, densities.classes)

    def at(self, tokens: int) -> LayerDensity:
        """For clips of so many tokens alone."""
        return LayerDensity(self.share, self.by_length.at(tokens))

    @property
    def by_length(self) -> ByLength:
        return ByLength(self.heads, self.classes)

    @property
    def mean(self) -> float:
        return math.fsum(self.heads) / len(self.heads)


def layer_densities(stage: Stage, attribute: str = "density") -> Mapping[int, LayerDensity]:
    """The layers that can be sparse, by number; empty for a stage that is dense."""
    table: dict[int, LayerDensity] = {}
    classes: dict[int, dict[int, Heads]] = {}
    for row in density_table(stage, attribute):
        for layer in row.layers:
            if row.length is None:
                table[layer] = LayerDensity(row.share, row.heads)
            else:
                classes.setdefault(layer, {})[row.length] = row.heads
    known = {layer: tuple(sorted(classes.get(layer, {}).items())) for layer in sorted(table)}
    return {layer: replace(table[layer], classes=own) for layer, own in known.items()}


@dataclass(frozen=True)
class DensityRow:
    """A row of the attribute: of these layers, for clips of all lengths, or of those of one class of ``length``."""

    layers: tuple[int, ...]
    share: float
    heads: Heads
    length: int | None


def density_table(stage: Stage, attribute: str = "density") -> tuple[DensityRow, ...]:
    """The rows of the attribute as they stand, right or wrong."""
    rows = stage.attrs.get(attribute, ())
    assert isinstance(rows, tuple)
    return tuple(_row(*row) for row in rows if isinstance(row, tuple))


def measured_densities(stage: Stage) -> Mapping[int, LayerDensity] | None:
    """The layers that a run has made sparse by now, with what it measured; None before any run did."""
    return layer_densities(stage, "measured") if "measured" in stage.attrs else None


def learned_densities(stage: Stage) -> Mapping[int, LayerDensity] | None:
    """The layers of a model that samples whose predictors a run has trained until they are ready, with what it
    measured; None for a model without predictors."""
    return layer_densities(stage, "learned") if "learned" in stage.attrs else None


def latest_densities(stage: Stage) -> Mapping[int, LayerDensity]:
    """Those of ``layer_densities``, as measured where they were."""
    return {**layer_densities(stage), **(measured_densities(stage) or {})}


def sparse_stages(module: Module) -> Mapping[int, Stage]:
    """The trained stages whose layers can attend to chosen keys, each by the number of its first layer in the model:
    layers of a model that is cut into stages are counted through."""
    first, stages = 0, {}
    for stage in module.stages:
        if stage.trained and layer_densities(stage):
            stages[first] = stage
        first += len(layers_of(stage)) if "part_of" in stage.attrs else 0
    return stages


def predictor_bytes(stages: Iterable[Stage]) -> int:
    """Of the gradients of all predictors of these stages, which are in 32 bits."""
    return sum(4 * (count_in(stage, "predictors") or 0) for stage in stages)


def density_rows(layers: Mapping[int, LayerDensity]) -> tuple[Value, ...]:
    """The attribute: layers of equal density in one row, by their first; behind these the rows of classes of length."""
    alike: dict[tuple[float, Heads], list[int]] = {}
    of_classes: dict[tuple[int, float, Heads], list[int]] = {}
    for layer, density in sorted(layers.items()):
        alike.setdefault((density.share, density.heads), []).append(layer)
        for length, heads in density.classes:
            of_classes.setdefault((length, density.share, heads), []).append(layer)
    every = tuple((tuple(numbers), *row) for row, numbers in alike.items())
    own = sorted(of_classes.items(), key=lambda item: item[0][0])
    return (*every, *((tuple(numbers), share, heads, length) for (length, share, heads), numbers in own))


def part_densities(
    layers: Mapping[int, LayerDensity], begin: int, end: int, pairs: float
) -> Mapping[int, LayerDensity]:
    """Those of layers ``begin`` to ``end`` - 1, numbered from 0, which compute ``pairs`` of the pairs of all."""
    return {
        layer - begin: replace(density, share=density.share / pairs)
        for layer, density in layers.items()
        if begin <= layer < end
    }


def sparse_layers(cascade: Cascade) -> tuple[int, ...]:
    """The layers in which a cascade attends to chosen keys."""
    listed = cascade.attrs.get("sparse")
    return () if listed is None else integers(listed)


def group_count(stage: Stage, tokens: int) -> int:
    """Query groups of a clip of so many tokens, at least 1; there are more where groups do not divide its sides."""
    return math.ceil(tokens / (count_in(stage, "query_group") or tokens or 1)) or 1


def total_share(layers: Iterable[LayerDensity]) -> float:
    """The share of the pairs of tokens that these layers compute."""
    return math.fsum(layer.share for layer in layers)


def _row(layers: Value, share: Value, heads: Value, length: Value | None = None) -> DensityRow:
    assert isinstance(heads, tuple)
    known = None if length is None else integer(length)
    return DensityRow(integers(layers), _number(share), tuple(map(_number, heads)), known)


def _number(value: Value) -> float:
    assert isinstance(value, int | float)
    return float(value)


CUT = -1


@dataclass(frozen=True, order=True)
class HeadPart:
    """Query groups ``start`` to ``stop`` - 1 of a head, at a place among the ranks of a clip."""

    head: int
    place: int
    start: int
    stop: int


def parts_by_layer(cascade: Cascade) -> Mapping[int, tuple[HeadPart, ...]]:
    """The parts of every sparse layer, by head; empty for a cascade whose heads are not divided."""
    rows = cascade.attrs.get("heads", ())
    assert isinstance(rows, tuple)
    groups = integer(cascade.attrs.get("groups", 0))
    table: dict[int, tuple[HeadPart, ...]] = {}
    for row in rows:
        assert isinstance(row, tuple)
        layers, places, cut = map(integers, row)
        whole = [HeadPart(head, place, 0, groups) for head, place in enumerate(places) if place != CUT]
        pieces = [HeadPart(*cut[at : at + 4]) for at in range(0, len(cut) - 3, 4)]
        table |= dict.fromkeys(layers, tuple(sorted([*whole, *pieces])))
    return table


def head_rows(layers: Mapping[int, Sequence[HeadPart]], heads: int, groups: int) -> tuple[Value, ...]:
    """The attribute: layers that are divided alike in one row, by their first."""
    alike: dict[tuple[HeadPart, ...], list[int]] = {}
    for layer, parts in sorted(layers.items()):
        alike.setdefault(tuple(sorted(parts)), []).append(layer)
    return tuple((tuple(numbers), *_places_and_parts(parts, heads, groups)) for parts, numbers in alike.items())


def _places_and_parts(parts: Sequence[HeadPart], heads: int, groups: int) -> tuple[Value, Value]:
    places = [CUT] * heads
    cut: list[int] = []
    for part in parts:
        if (part.start, part.stop) == (0, groups):
            places[part.head] = part.place
        else:
            cut += [part.head, part.place, part.start, part.stop]
    return tuple(places), tuple(cut)
