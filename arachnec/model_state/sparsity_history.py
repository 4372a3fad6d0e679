"""What a run has measured of its layers step by step, of any length: for its report, and kept in its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

HISTORY = "predictor/history/"  # of a checkpoint's tensors, those that an earlier version did not keep
MOST = 128  # steps whose sparsities are kept


@dataclass
class SparsityHistory:
    """Sparsities by layer and head after steps. Where there are more than ``MOST`` every second is forgotten."""

    steps: list[int] = field(default_factory=list)
    rows: list[Mapping[int, tuple[float, ...]]] = field(default_factory=list)
    every: int = 1

    @classmethod
    def of(cls, numbers: Tensor, layers: Mapping[int, Tensor]) -> SparsityHistory:
        """From what ``numbers`` and ``of_layer`` gave."""
        every, *steps = (number for number in numbers.tolist() if number >= 0)
        rows = [{number: tuple(row[place].tolist()) for number, row in layers.items()} for place in range(len(steps))]
        return cls(steps, [*rows], every)

    def numbers(self) -> Tensor:
        """[MOST + 1] int64: ``every``, the steps, and -1 where there are fewer."""
        return torch.tensor([self.every, *self.steps, *[-1] * (MOST - len(self.steps))])

    def of_layer(self, number: int, heads: int) -> Tensor:
        """[MOST, heads] fp32: a layer's sparsities after these steps."""
        table = torch.zeros(MOST, heads)
        for place, row in enumerate(self.rows):
            table[place] = torch.tensor(row[number])
        return table

    def add(self, step: int, row: Mapping[int, tuple[float, ...]]) -> None:
        if step % self.every:
            return
        self.steps.append(step)
        self.rows.append(row)
        while len(self.steps) > MOST:
            self.every *= 2
            kept = [place for place, known in enumerate(self.steps) if known % self.every == 0]
            self.steps, self.rows = [self.steps[p] for p in kept], [self.rows[p] for p in kept]
