"""What a run knows of a layer's heads for clips of one class of length, and the tensor that keeps it in a checkpoint.

In: states by class. Out: numbers, those of classes that nothing was measured of ``UNMEASURED``; and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from arachnec.ir.head_density import LENGTH_CLASSES, Heads

CLASSES = "predictor/history/classes/"  # before a layer's name; earlier versions kept none
VALUES = 3  # of a head
UNMEASURED = -1.0  # no share


@dataclass(frozen=True)
class ClassState:
    """By head: measured sparsity, the share of key blocks that a group of queries needs, and what groups chose together
    of what as many would take, if each chose by itself."""

    sparsities: Heads
    densities: Heads
    spread: Heads


def class_numbers(heads: int) -> int:
    """How many numbers a layer's states are."""
    return len(LENGTH_CLASSES) * VALUES * heads


def class_tensor(classes: Mapping[int, ClassState], heads: int) -> Tensor:
    table = torch.full((len(LENGTH_CLASSES), VALUES, heads), UNMEASURED, dtype=torch.float64)
    for length, state in classes.items():
        table[LENGTH_CLASSES.index(length)] = torch.tensor(astuple(state), dtype=torch.float64)
    return table.view(-1)


def classes_of(values: Tensor, heads: int) -> dict[int, ClassState]:
    """From what ``class_tensor`` gave; of no numbers none. Raises ValueError for a class whose values are not all
    finite."""
    classes: dict[int, ClassState] = {}
    for length, table in zip(LENGTH_CLASSES, values.view(-1, VALUES, heads), strict=False):  # of none: no rows
        if bool((table == UNMEASURED).all()):
            continue
        if not bool(table.isfinite().all()):
            raise ValueError(f"is not finite in the class of {length} tokens")
        classes[length] = ClassState(*map(tuple, table.tolist()))
    return classes
