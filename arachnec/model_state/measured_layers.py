"""What a run measures of its sparse layers: in a step, over steps, summarised for its report, in its checkpoints.

A clip's cascade adds to its own class; the values over all lengths are of the classes' sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from arachnec.checkpoint.class_states import CLASSES, UNMEASURED, ClassState, classes_of
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.head_density import LENGTH_CLASSES, ByLength, Heads, LayerDensity, length_class
from arachnec.kernels.attention.host_tables import on_device
from arachnec.kernels.sparse.predictor import moved
from arachnec.model_state.layer_summary import ClassSummary, LayerSummary
from arachnec.planning.sparse_stages import Forecast
from arachnec.spmd.sparse_layers import LayerState, Measured

LEAST = 1e-6  # of what groups would choose by themselves, and of a density that is planned for
MEASURES = 8  # rows of what is measured by head

Classes = Mapping[int, ClassState]


def no_totals(state: LayerState) -> Tensor:
    """[classes, measures, heads] of nothing, where the layer's projections are."""
    return state.projections.query.new_zeros(len(LENGTH_CLASSES), MEASURES, state.site.heads)


def add_to(totals: Tensor, measured: Measured, tokens: int, weight: float) -> None:
    """Adds what a cascade of clips of so many tokens measured of some heads."""
    own = on_device(torch.tensor(measured.heads), measured.loss.device)
    of_group = (measured.needed, measured.held, measured.of_best)
    rows = (measured.counted, measured.loss, measured.sparsity, *of_group, measured.taken, measured.alone)
    totals[LENGTH_CLASSES.index(length_class(tokens))].index_add_(1, own, torch.stack(rows) * weight)


def weights_of(totals: Tensor) -> Tensor:
    """Of every head what was added up over all classes, 0 where nothing was measured."""
    return totals.sum(0)[0]


def means(totals: Tensor, gradients: tuple[Tensor, Tensor]) -> Measured:
    """Over clips of all lengths, of totals that have all heads."""
    return _means(totals.sum(0), gradients)


def spread(measured: Measured) -> tuple[float, ...]:
    """What groups chose together, of what as many would take, if each chose by itself."""
    shares = (measured.taken / measured.alone.clamp_min(LEAST)).clamp_max(1.0)
    return tuple(shares.tolist())


def classes_after(state: LayerState, known: Classes, totals: Tensor) -> dict[int, ClassState]:
    """By class after a step; ``state`` and ``known`` are those before it. A class that was not measured stays."""
    after = dict(known)
    for length, own in zip(LENGTH_CLASSES, totals, strict=True):
        if bool((own[0] > 0).all()):
            before, measured = for_length(state, known, length), _means(own, ())
            sparsities = moved(before.sparsities, measured.sparsity.tolist())
            densities = moved(before.densities, measured.needed.tolist())
            after[length] = ClassState(sparsities, densities, spread(measured))
    return dict(sorted(after.items()))


def for_length(state: LayerState, classes: Classes, tokens: int) -> LayerState:
    """A layer as it is for clips of so many tokens: as for all lengths where their class was not measured yet."""
    own = classes.get(length_class(tokens))
    return state if own is None else replace(state, sparsities=own.sparsities, densities=own.densities)


def _means(totals: Tensor, gradients: tuple[Tensor, ...]) -> Measured:
    counted, loss, sparsity, needed, held, of_best, taken, alone = totals / totals[0]
    heads = tuple(range(len(counted)))
    return Measured(counted, loss, sparsity, needed, held, of_best, taken, alone, gradients, heads)  # type: ignore[arg-type]


HISTORY = "predictor/history/"  # of a checkpoint's tensors, those that an earlier version did not keep
STEPS_KEPT = 128  # steps whose sparsities are kept


@dataclass
class SparsityHistory:
    """Sparsities by layer, class of length and head after steps. Of more than ``STEPS_KEPT`` every second is
    forgotten."""

    steps: list[int] = field(default_factory=list)
    rows: list[Mapping[int, ByLength]] = field(default_factory=list)
    every: int = 1

    @classmethod
    def of(cls, numbers: Tensor, layers: Mapping[int, Tensor], classes: Mapping[int, Tensor]) -> SparsityHistory:
        """From what ``numbers``, ``of_layer`` and ``of_classes`` gave, the last of some layers, or of none. Raises
        ValueError where these are no numbers of steps."""
        every, *steps = numbers.tolist()
        steps = [number for number in steps if number >= 0]
        if every < 1 or steps != sorted(set(steps)):
            raise ValueError("has no ascending numbers of steps")
        known = {number: _by_step(table, classes.get(number), len(steps)) for number, table in layers.items()}
        rows = [{number: of_layer[place] for number, of_layer in known.items()} for place in range(len(steps))]
        return cls(steps, [*rows], every)

    def numbers(self) -> Tensor:
        """[STEPS_KEPT + 1] int64: ``every``, the steps, and -1 where there are fewer."""
        return torch.tensor([self.every, *self.steps, *[-1] * (STEPS_KEPT - len(self.steps))])

    def of_layer(self, number: int, heads: int) -> Tensor:
        """[STEPS_KEPT, heads] fp32: a layer's sparsities after these steps, for clips of all lengths."""
        table = torch.zeros(STEPS_KEPT, heads)
        for place, row in enumerate(self.rows):
            table[place] = torch.tensor(row[number].heads)
        return table

    def of_classes(self, number: int, heads: int) -> Tensor:
        """[STEPS_KEPT, classes, heads] fp32: the same by class of length."""
        table = torch.full((STEPS_KEPT, len(LENGTH_CLASSES), heads), UNMEASURED)
        for place, row in enumerate(self.rows):
            for length, own in row[number].classes:
                table[place, LENGTH_CLASSES.index(length)] = torch.tensor(own)
        return table

    def add(self, step: int, row: Mapping[int, ByLength]) -> None:
        if step % self.every:
            return
        self.steps.append(step)
        self.rows.append(row)
        while len(self.steps) > STEPS_KEPT:
            self.every *= 2
            kept = [place for place, known in enumerate(self.steps) if known % self.every == 0]
            self.steps, self.rows = [self.steps[p] for p in kept], [self.rows[p] for p in kept]


def _by_step(every: Tensor, classes: Tensor | None, steps: int) -> list[ByLength]:
    rows = [tuple(row) for row in every[:steps].tolist()]
    if classes is None:
        return [ByLength(row) for row in rows]
    return [ByLength(row, _measured(own)) for row, own in zip(rows, classes[:steps], strict=True)]


def _measured(table: Tensor) -> tuple[tuple[int, tuple[float, ...]], ...]:
    known = (table != UNMEASURED).all(1).tolist()
    rows = zip(LENGTH_CLASSES, known, table.tolist(), strict=True)
    return tuple((length, tuple(values)) for length, measured, values in rows if measured)


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


def damaged_layers_error(folder: str, what: str, reason: str) -> UserError:
    return user_error(
        f"the checkpoint {folder} is damaged: {what} {reason}",
        help=(
            "delete this folder, and --resume goes on from the checkpoint before it; or begin anew in "
            "another --checkpoint folder"
        ),
    )


@dataclass(frozen=True)
class KeptLayer:
    """By head of clips of all lengths, and by class of length. ``sparse`` in the next step. An earlier version kept no
    ``spread``, and one no ``classes``."""

    sparsities: Heads
    densities: Heads
    sparse: bool
    spread: Heads | None
    classes: Mapping[int, ClassState] | None


def kept_layers(tensors: Mapping[str, Tensor], names: Mapping[int, str], folder: str) -> dict[int, KeptLayer]:
    """By number of the layers with these ``names``. Raises ``UserError`` for what no run can have measured."""
    known = {}
    for number, name in names.items():
        try:
            known[number] = _layer(tensors, name)
        except ValueError as wrong:
            raise damaged_layers_error(folder, f"the state of sparse layer `{name}`", str(wrong)) from None
    return known


def kept_history(tensors: Mapping[str, Tensor], names: Mapping[int, str], folder: str) -> SparsityHistory:
    """Of the layers with these ``names``; an earlier version kept none. Raises ``UserError`` where it has no steps."""
    if f"{HISTORY}steps" not in tensors:
        return SparsityHistory()
    rows = {number: tensors[f"{HISTORY}layer/{name}"] for number, name in names.items()}
    by_class = {n: tensors[f"{HISTORY}by-class/{name}"] for n, name in names.items() if f"{CLASSES}{name}" in tensors}
    try:
        return SparsityHistory.of(tensors[f"{HISTORY}steps"], rows, by_class)
    except ValueError as wrong:
        raise damaged_layers_error(folder, "the history of sparse layers", str(wrong)) from None


def _layer(tensors: Mapping[str, Tensor], name: str) -> KeptLayer:
    *values, sparse = tensors[f"predictor/layer/{name}"].tolist()
    heads = len(values) // 2
    sparsities, densities = tuple(values[:heads]), tuple(values[heads:])
    spread = tensors.get(f"{HISTORY}spread/{name}")
    table = tensors.get(f"{CLASSES}{name}")
    classes = None if table is None else classes_of(table, heads)
    known = (*sparsities, *densities, *(() if spread is None else spread.tolist()))
    if not all(map(math.isfinite, known)):
        raise ValueError("is not finite")
    if sparse not in (0.0, 1.0):
        raise ValueError("does not say whether it is sparse")
    _demand_shares(densities, "")
    for length, own in (classes or {}).items():
        _demand_shares(own.densities, f" in the class of {length} tokens")
    return KeptLayer(sparsities, densities, bool(sparse), None if spread is None else tuple(spread.tolist()), classes)


def _demand_shares(densities: Heads, where: str) -> None:
    if not all(0 < share <= 1 for share in densities):
        raise ValueError(f"has a density that is no share of the keys{where}")
