"""What a run reports of a layer that can attend to chosen keys. Without torch: who shows a report needs none."""

from __future__ import annotations

import msgspec


class ClassSummary(msgspec.Struct, frozen=True):
    """Of one layer, for clips of ``tokens`` to twice as many: what is measured by head with momentum, and the densities
    that the last step's plan was made with. ``history`` are the sparsities after each of the layer's ``steps``; before
    the class was measured those of all lengths, which it had."""

    tokens: int
    sparsity: list[float]
    density: list[float]
    planned_density: list[float]
    history: list[list[float]] = []


class LayerSummary(msgspec.Struct, frozen=True):
    """Of one layer after the last step: means over heads and, by head, what is measured with momentum. ``loss``,
    ``mass`` (of a group's attention, that its chosen blocks hold) and ``of_best`` (the share of what the best choice of
    that size would hold) are of the last step that measured it. ``imbalance`` is the heaviest rank's heads over the
    mean by the densities that are measured now, in the cascade where that is most; ``planned_imbalance`` by those that
    the plan was made with, ``known_imbalance`` what it would be, had they been known. ``sparse_lengths`` are the tokens
    of that step's clips in which the layer, if it is sparse, is so: in others dense is faster by what its heads need.
    ``history`` are the sparsities of heads after each of ``steps``; of a long run every second, fourth and so on.
    ``sparsity``, ``density`` and ``history`` are over clips of all lengths, ``classes`` those of one class each."""

    layer: int
    path: str
    sparse: bool
    sparsity: list[float]
    density: list[float]
    loss: float | None = None
    mass: float | None = None
    of_best: float | None = None
    planned_density: list[float] = []
    planned_imbalance: float = 1.0
    imbalance: float = 1.0
    known_imbalance: float = 1.0
    sparse_lengths: list[int] = []
    steps: list[int] = []
    history: list[list[float]] = []
    classes: list[ClassSummary] = []
