"""What a run has measured of its layers step by step, of any length: for its report, and kept in its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from arachnec.checkpoint.class_states import UNMEASURED
from arachnec.ir.head_density import LENGTH_CLASSES, ByLength

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
