"""Which layers of a stage attend to chosen keys, and to how many. In: the attribute ``density``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from arachnec.ir.gradient_buckets import layers_of
from arachnec.ir.nodes import Cascade, Module, Stage, integers
from arachnec.ir.stage_sizes import count_in
from arachnec.ir.values import Value


@dataclass(frozen=True)
class LayerDensity:
    """Of one layer. A layer that lists none attends to all keys."""

    share: float  # of the pairs of tokens that all attentions of the stage compute
    heads: tuple[float, ...]  # for each head the share of keys that a query attends to

    @property
    def mean(self) -> float:
        return math.fsum(self.heads) / len(self.heads)


def layer_densities(stage: Stage, attribute: str = "density") -> Mapping[int, LayerDensity]:
    """The layers that can be sparse, by number; empty for a stage that is dense."""
    rows = stage.attrs.get(attribute, ())
    assert isinstance(rows, tuple)
    table: dict[int, LayerDensity] = {}
    for row in rows:
        assert isinstance(row, tuple)
        layers, share, heads = row
        density = LayerDensity(_number(share), tuple(map(_number, heads)))  # type: ignore[arg-type]
        table |= dict.fromkeys(integers(layers), density)
    return dict(sorted(table.items()))


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


def density_rows(layers: Mapping[int, LayerDensity]) -> tuple[Value, ...]:
    """The attribute: layers of equal density in one row, by their first."""
    alike: dict[LayerDensity, list[int]] = {}
    for layer, density in sorted(layers.items()):
        alike.setdefault(density, []).append(layer)
    return tuple((tuple(numbers), density.share, density.heads) for density, numbers in alike.items())


def part_densities(
    layers: Mapping[int, LayerDensity], begin: int, end: int, pairs: float
) -> Mapping[int, LayerDensity]:
    """Those of layers ``begin`` to ``end`` - 1, numbered from 0, which compute ``pairs`` of the pairs of all."""
    return {
        layer - begin: LayerDensity(density.share / pairs, density.heads)
        for layer, density in layers.items()
        if begin <= layer < end
    }


def sparse_layers(cascade: Cascade) -> tuple[int, ...]:
    """The layers in which a cascade attends to chosen keys."""
    return integers(cascade.attrs.get("sparse", ()))


def group_count(stage: Stage, tokens: int) -> int:
    """Query groups of a clip of so many tokens, at least 1; there are more where groups do not divide its sides."""
    return math.ceil(tokens / (count_in(stage, "query_group") or tokens or 1)) or 1


def total_share(layers: Iterable[LayerDensity]) -> float:
    """The share of the pairs of tokens that these layers compute."""
    return math.fsum(layer.share for layer in layers)


def _number(value: Value) -> float:
    assert isinstance(value, int | float)
    return float(value)
