"""What all ranks measured of a layer in a step, by class of length. In: totals over cascades, each with its weight.
Out: means, and what is known of the layer's heads after it.

A clip's cascade adds to its own class; the values over all lengths are of the classes' sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from arachnec.checkpoint.class_states import ClassState
from arachnec.ir.head_density import LENGTH_CLASSES, length_class
from arachnec.kernels.attention.host_tables import on_device
from arachnec.kernels.sparse.predictor import moved
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
