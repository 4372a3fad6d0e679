"""A model whose weights rank 0 draws or every rank reads, and every rank keeps its shards of: none holds the whole."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arachnec.backends.torch_distributed.weights.streamed_weights import Offered, Take, put_kept, streamed_model
from arachnec.executable.training_options import Training
from arachnec.model_state.cells.flat_layer import FlatLayer, FlatLayout, layouts_of
from arachnec.model_state.cells.gathering import Slots
from arachnec.models.file import ModelFile
from arachnec.runtime.host_copies import HostCopies
from arachnec.tracing.layers import layer_of_parameters


@dataclass(frozen=True)
class DealtStage:
    """What of a model is dealt out over cells of ``cell`` ranks each: the ``parameters`` of a stage, None for all.

    ``paths`` are its layers, ``ranks`` those that hold it.
    """

    name: str
    paths: tuple[str, ...]
    parameters: frozenset[str] | None
    ranks: tuple[int, ...]
    cell: int
    in_host: bool = False  # whether shards and gradients lie in the hosts' memory


def dealt_out_model(
    model_file: ModelFile,
    training: Training,
    device: torch.device,
    stages: Sequence[DealtStage],
    own: Collection[str] | None = None,
    copies: HostCopies | None = None,
    init: Path | None = None,
) -> tuple[nn.Module, dict[str, list[FlatLayer]], Slots]:
    """The model of ``build_model``, its parameters dealt out as the stages say; the flat tensors of those on this rank,
    and the slots that they are whole in.

    With ``copies`` the shards of stages that are ``in_host`` lie there. What no stage deals out is whole on the ranks
    whose ``own`` it is. Of all else nothing is kept. ``init`` and ``UserError`` as in ``streamed_model``. Collective.
    """
    shards_of: dict[str, _Shards] = {}
    kept: dict[str, Tensor] = {}

    def taking(model: nn.Module) -> Take:
        left = dict(model.named_parameters())
        for stage in stages:
            named = {n: left.pop(n) for n in list(left) if stage.parameters is None or n in stage.parameters}
            if dist.get_rank() in stage.ranks:
                layouts = layouts_of(named, numbered(model, stage.paths), stage.cell)
                shards_of[stage.name] = _Shards(layouts, device, copies if stage.in_host else None)

        def take(name: str, value: Offered) -> None:
            for shards in shards_of.values():
                shards.take(name, value)
            if name in left and (own is None or name in own):
                kept[name] = value.whole()

        return take

    model = streamed_model(model_file, training, device, taking, init)
    parameters = dict(model.named_parameters())
    last = {stage.name: len(stage.paths) for stage in stages}
    slots = Slots.of([(shards.layouts, last[name]) for name, shards in shards_of.items()], device)
    flats = {name: list(shards.flats(slots, last[name], parameters)) for name, shards in shards_of.items()}
    slots.drop()
    put_kept(model, parameters, kept, device)
    return model, flats, slots


def numbered(model: nn.Module, paths: Sequence[str]) -> dict[str, int]:
    """The layer of every parameter; the last number for one that lies in no layer, or in several."""
    layers = layer_of_parameters(model, paths, frozen=True)
    return {name: len(paths) if layer is None else layer for name, layer in layers.items()}


class _Shards:
    """This rank's shards of the layouts that are its own, filled from parameters as they come."""

    def __init__(self, layouts: Sequence[FlatLayout], device: torch.device, copies: HostCopies | None) -> None:
        self.layouts, self._copies = layouts, copies
        self.member = dist.get_rank() % layouts[0].ranks if layouts else 0
        if copies is None:
            self.values = [torch.zeros(layout.shard_size, dtype=layout.dtype, device=device) for layout in layouts]
        else:
            self.values = [copies.buffer(layout.shard_size, layout.dtype).zero_() for layout in layouts]
        self._pieces = {
            piece.slot.name: (piece, shard)
            for layout, shard in zip(layouts, self.values, strict=True)
            for piece in layout.pieces(self.member)
        }

    def flats(self, slots: Slots, last: int, parameters: dict[str, nn.Parameter]) -> Iterator[FlatLayer]:
        """The flat tensors layer by layer, their parameters taken off ``parameters``."""
        pairs = zip(self.layouts, self.values, strict=True)
        for layer, own in groupby(pairs, key=lambda pair: pair[0].layer):
            layouts, shards = zip(*own, strict=True)
            for layout, shard, whole in zip(layouts, shards, slots.places(layer, last, layouts), strict=True):
                named = {slot.name: parameters.pop(slot.name) for slot in layout.slots}
                yield FlatLayer.of(layout, shard, whole, named, self.member, self._copies)

    def take(self, name: str, value: Offered) -> None:
        if name in self._pieces:
            piece, shard = self._pieces[name]
            shard[piece.place : piece.place + piece.size] = value.piece(piece.start, piece.size)
