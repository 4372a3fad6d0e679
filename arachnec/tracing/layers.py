"""The layer that every trained parameter belongs to; gradient buckets are runs of layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from arachnec.ir.state_placement import Outside, TensorSize, joined, tensor_attributes
from arachnec.ir.values import Value
from arachnec.tracing.graph import dtype_name

if TYPE_CHECKING:
    from torch import nn

ADAMW = 8, 4  # bytes that it keeps for each element, two moments in fp32 (arXiv 1412.6980), and for each tensor


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


def tensor_sizes(
    model: nn.Module, layers: Sequence[str], read_by: Mapping[str, Sequence[int]]
) -> dict[str, Value | None]:
    """The sizes of a model's tensors as a stage says them: of every layer, of what lies in none or is read in several,
    and of its buffers. ``read_by`` are the layers that each parameter is read with, where that is known."""
    numbers = layer_of_parameters(model, layers, frozen=True)
    own: dict[int, list[TensorSize]] = defaultdict(list)
    outside: list[Outside] = []
    for name, parameter in model.named_parameters():
        kept = ADAMW if parameter.requires_grad else (0, 0)
        size = TensorSize(dtype_name(parameter.dtype), parameter.numel(), parameter.requires_grad, *kept)
        layer, readers = numbers[name], tuple(read_by.get(name, ()))
        if layer is not None and set(readers) <= {layer}:
            own[layer].append(size)
            continue
        outside = joined(outside, Outside(len(layers) if layer is None else layer, readers, (), (size,)))
    attributes = tensor_attributes((tuple(own[layer]) for layer in range(len(layers))), outside)
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    return {**attributes, "unsharded": buffers or None}
