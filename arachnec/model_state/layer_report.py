"""The summary of a layer from what a run knows of it: predicted densities beside measured ones, for all lengths and by
class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from arachnec.checkpoint.class_states import ClassState
from arachnec.ir.head_density import Heads, LayerDensity
from arachnec.model_state.layer_summary import ClassSummary, LayerSummary
from arachnec.model_state.sparsity_history import SparsityHistory
from arachnec.planning.sparse_stages import Forecast
from arachnec.spmd.sparse_layers import LayerState, Measured


@dataclass(frozen=True)
class PlannedLayer:
    """What the last step's plan makes of a layer: its densities, the heaviest rank's heads, and the lengths of clips in
    which it runs sparse."""

    density: LayerDensity
    forecast: Forecast
    sparse_lengths: list[int]


def layer_summary(
    number: int,
    path: str,
    state: LayerState,
    classes: Mapping[int, ClassState],
    last: Measured | None,
    planned: PlannedLayer,
    history: SparsityHistory,
) -> LayerSummary:
    """``last`` is of the last step that measured the layer."""
    names = ("loss", "mass", "of_best")
    values = () if last is None else (last.loss, last.held, last.of_best)
    return LayerSummary(
        number,
        path,
        state.sparse,
        list(state.sparsities),
        list(state.densities),
        **{name: float(value.mean()) for name, value in zip(names, values, strict=False)},
        planned_density=list(planned.density.heads),
        planned_imbalance=planned.forecast.planned,
        imbalance=planned.forecast.measured,
        known_imbalance=planned.forecast.known,
        sparse_lengths=planned.sparse_lengths,
        steps=history.steps,
        history=[_rounded(row[number].heads) for row in history.rows],
        classes=[_of_class(number, length, own, planned.density, history) for length, own in classes.items()],
    )


def _of_class(
    number: int, length: int, own: ClassState, planned: LayerDensity, history: SparsityHistory
) -> ClassSummary:
    steps = [_rounded(row[number].at(length)) for row in history.rows]
    return ClassSummary(length, list(own.sparsities), list(own.densities), list(planned.at(length).heads), steps)


def _rounded(row: Heads) -> list[float]:
    return [round(value, 4) for value in row]
