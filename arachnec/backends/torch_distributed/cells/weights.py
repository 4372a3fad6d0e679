"""A model whose weights rank 0 reads or draws, and every rank keeps its shards of: none ever holds the whole."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arachnec.backends.torch_distributed.cells.flat_layer import FlatLayer
from arachnec.backends.torch_distributed.cells.layout import FlatLayout, layouts_of
from arachnec.backends.torch_distributed.streamed_weights import Take, streamed_model
from arachnec.executable.training_options import Training
from arachnec.models.file import ModelFile
from arachnec.tracing.layers import layer_of_parameters


def dealt_out_model(
    model_file: ModelFile, training: Training, device: torch.device, paths: Sequence[str], cell: int
) -> tuple[nn.Module, list[FlatLayer]]:
    """The model of ``build_model``, its parameters dealt out over cells of so many ranks. Collective.

    ``paths`` are its layers. Raises ``UserError`` where the ranks' models have other tensors.
    """
    made: list[_Shards] = []

    def taking(model: nn.Module) -> Take:
        made.append(_Shards(layouts_of(dict(model.named_parameters()), numbered(model, paths), cell), device))
        return made[0].take

    model = streamed_model(model_file, training, device, taking)
    shards = made[0]
    parameters = dict(model.named_parameters())
    flats = [
        FlatLayer.of(layout, shard, {slot.name: parameters[slot.name] for slot in layout.slots}, shards.member)
        for layout, shard in zip(shards.layouts, shards.values, strict=True)
    ]
    model.to(device)  # what is no tensor of the module, such as a device that it remembers
    return model, flats


def numbered(model: nn.Module, paths: Sequence[str]) -> dict[str, int]:
    """The layer of every parameter; the last number for one that lies in no layer, or in several."""
    layers = layer_of_parameters(model, paths, frozen=True)
    return {name: len(paths) if layer is None else layer for name, layer in layers.items()}


class _Shards:
    """This rank's shards, filled from parameters as they come."""

    def __init__(self, layouts: Sequence[FlatLayout], device: torch.device) -> None:
        self.layouts = layouts
        self.member = dist.get_rank() % layouts[0].ranks
        self.values = [torch.zeros(layout.shard_size, dtype=layout.dtype, device=device) for layout in layouts]
        self._pieces = {
            piece.slot.name: (piece, shard)
            for layout, shard in zip(layouts, self.values, strict=True)
            for piece in layout.pieces(self.member)
        }

    def take(self, name: str, value: Tensor) -> None:
        if name in self._pieces:
            piece, shard = self._pieces[name]
            shard[piece.place : piece.place + piece.size] = value.reshape(-1)[piece.start : piece.start + piece.size]
