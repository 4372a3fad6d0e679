"""The layer that every trained parameter belongs to; gradient buckets are runs of layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def layer_of_parameters(model: nn.Module, layers: Sequence[str], *, frozen: bool = False) -> dict[str, int | None]:
    """For every parameter that trains, or for all, by its first name, the number of the layer that holds it.

    None for a parameter outside the layers, or one that another part of the model shares: its gradient is complete only
    when a backward has ended.
    """
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if frozen or parameter.requires_grad:
            names[id(parameter)].append(name)
    numbers = {path: number for number, path in enumerate(layers)}
    return {aliases[0]: _only({_layer(name, numbers) for name in aliases}) for aliases in names.values()}


def _layer(name: str, numbers: dict[str, int]) -> int | None:
    path = name
    while path:
        path = path.rpartition(".")[0]
        if path in numbers:
            return numbers[path]
    return None


def _only(layers: set[int | None]) -> int | None:
    return layers.pop() if len(layers) == 1 else None
