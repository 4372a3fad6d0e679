"""What a plan makes of a sparse stage, in numbers. In: a module. Out: a summary for every stage with densities."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from arachnec.cost.sparse_attention import ATTENDS, divided, given_divisions, head_weights
from arachnec.ir.head_density import (
    ByLength,
    LayerDensity,
    latest_densities,
    length_class,
    measured_densities,
    sparse_layers,
    sparse_stages,
)
from arachnec.ir.nodes import Cascade, Module, Stage, integer
from arachnec.ir.stage_sizes import layers_of
from arachnec.sparsity.head_shares import imbalance


@dataclass(frozen=True)
class SparseSummary:
    """Of one stage and its cascades."""

    stage: Stage
    layers: int  # of the stage, all
    sparse: int  # that have densities
    density: float  # mean over heads and sparse layers, predicted, for clips of all lengths
    least: float
    most: float
    classes: Mapping[int, float]  # the same mean for the classes of length of its cascades, where some differ
    chosen: tuple[Cascade, ...]  # cascades that run some layer sparse
    dense: tuple[Cascade, ...]  # those that run none
    measured: int | None  # layers that were sparse in a run when this was planned; None for a plan before any run
    imbalance: float  # the heaviest rank's heads over the mean, the worst layer of all cascades; 1 without ranks


def sparse_summaries(module: Module) -> tuple[SparseSummary, ...]:
    """Of the stages with densities, in the order of the module."""
    summaries = []
    for stage in module.stages:
        table = latest_densities(stage)
        if not table:
            continue
        heads = [density for layer in table.values() for density in layer.heads]
        own = [x for layer in table.values() for _, densities in layer.classes for x in densities]
        cascades = [c for c in module.cascades if c.stage == stage.name and c.phase in ATTENDS]
        worst = max((worst_imbalance(cascade, stage) for cascade in distinct_divisions(cascades)), default=1.0)
        summaries.append(
            SparseSummary(
                stage,
                len(layers_of(stage)),
                len(table),
                math.fsum(heads) / len(heads),
                min([*heads, *own]),
                max([*heads, *own]),
                _by_class(cascades, table) if own else {},
                tuple(cascade for cascade in cascades if sparse_layers(cascade)),
                tuple(cascade for cascade in cascades if not sparse_layers(cascade)),
                None if (now := measured_densities(stage)) is None else len(now),
                worst,
            )
        )
    return tuple(summaries)


def _by_class(cascades: Iterable[Cascade], table: Mapping[int, LayerDensity]) -> Mapping[int, float]:
    lengths = sorted({length_class(cascade.tokens) for cascade in cascades if sparse_layers(cascade)})
    heads = {length: [x for layer in table.values() for x in layer.at(length).heads] for length in lengths}
    return {length: math.fsum(own) / len(own) for length, own in heads.items()}


@dataclass(frozen=True)
class Forecast:
    """Of one layer, the heaviest rank's heads over the mean, in the cascade where that is most: as planned, as it is
    with measured densities, and as it would be had they been known. 1 without ranks."""

    planned: float
    measured: float
    known: float


def forecasts(module: Module, measured: Mapping[int, ByLength]) -> Mapping[int, Forecast]:
    """By layer of the model with ``measured`` densities by head."""
    rows = {}
    for first, stage in sparse_stages(module).items():
        cascades = [c for c in module.cascades if c.stage == stage.name and "heads" in c.attrs]
        divided_alike = list(distinct_divisions(cascades))
        for layer, planned in latest_densities(stage).items():
            if first + layer in measured:
                now = LayerDensity.of(planned.share, measured[first + layer])
                rows[first + layer] = _forecast(stage, divided_alike, layer, planned, now)
    return rows


def _forecast(
    stage: Stage, cascades: Sequence[Cascade], layer: int, planned: LayerDensity, now: LayerDensity
) -> Forecast:
    """Of one layer of a stage; ``cascades`` are those with its distinct divisions of heads."""
    worst = Forecast(1.0, 1.0, 1.0)
    for cascade in cascades:
        division, groups = given_divisions(cascade).get(layer), integer(cascade.attrs["groups"])
        if division is None:
            continue
        assumed, own = planned.at(cascade.tokens), now.at(cascade.tokens)
        weights = head_weights(stage, own)
        ratio = imbalance(division, weights, groups)
        if ratio >= worst.measured:
            of_plan = imbalance(division, head_weights(stage, assumed), groups)
            best = imbalance(divided(stage, own, groups, cascade.degree), weights, groups)
            worst = Forecast(of_plan, ratio, best)
    return worst


def distinct_divisions(cascades: Sequence[Cascade]) -> Iterator[Cascade]:
    """One cascade for every division of heads in every class of length."""
    divided_ones = (cascade for cascade in cascades if "heads" in cascade.attrs)
    yield from {(c.attrs["heads"], length_class(c.tokens)): c for c in divided_ones}.values()


def worst_imbalance(cascade: Cascade, stage: Stage) -> float:
    """The heaviest rank's heads over the mean, in the layer where that is most; 1 for a cascade without ``heads``."""
    table, groups = latest_densities(stage), integer(cascade.attrs.get("groups", 1))
    divisions = given_divisions(cascade).items()
    own = {layer: head_weights(stage, table[layer].at(cascade.tokens)) for layer, _ in divisions}
    ratios = [imbalance(division, own[layer], groups) for layer, division in divisions]
    return max(ratios, default=1.0)
