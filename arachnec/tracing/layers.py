"""Which of a model's parameters lie in which of its layers: what a bucket of gradients is made of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def layer_of_parameters(model: nn.Module, layers: Sequence[str]) -> dict[str, int | None]:
    """For every parameter that trains, by its first name, the number of the layer that holds it.

    None for one that lies outside the layers, or that another part of the model holds too: its gradient is whole only
    when a backward has ended.
    """
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names[id(parameter)].append(name)
    numbers = {path: number for number, path in enumerate(layers)}
    return {same[0]: _one_of({_layer(name, numbers) for name in same}) for same in names.values()}


def _layer(name: str, numbers: dict[str, int]) -> int | None:
    path = name
    while path:
        path = path.rpartition(".")[0]
        if path in numbers:
            return numbers[path]
    return None


def _one_of(found: set[int | None]) -> int | None:
    return found.pop() if len(found) == 1 else None
