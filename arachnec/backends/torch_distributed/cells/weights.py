"""A model whose weights rank 0 reads or draws, and every rank keeps its shards of.

Weights are sent tensor by tensor: a rank other than 0 never holds more than one of them whole. Rank 0 has all of them
in its host's memory, once, and gives each up as it is sent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arachnec.backends.cascade_step import build_model
from arachnec.backends.torch_distributed.agreement import agree
from arachnec.backends.torch_distributed.cells.flat_layer import FlatLayer
from arachnec.backends.torch_distributed.cells.layout import FlatLayout, layouts_of
from arachnec.backends.torch_distributed.shared_weights import (
    CPU,
    Modules,
    broadcast,
    digest_of,
    leave_out,
    pass_on,
    put_in_place,
    share_random_state,
    without_memory,
)
from arachnec.executable.training_options import Training
from arachnec.models.file import ModelFile
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


def dealt_out_model(
    model_file: ModelFile,
    training: Training,
    device: torch.device,
    stages: Sequence[DealtStage],
    own: Collection[str] | None = None,
) -> tuple[nn.Module, dict[str, list[FlatLayer]]]:
    """The model of ``build_model``, its parameters dealt out as the stages say; the flat tensors of those on this rank.

    What no stage deals out is whole on the ranks whose ``own`` it is. Of all else nothing is kept. Collective. Raises
    ``UserError`` where the ranks' models have other tensors.
    """

    def build(home: torch.device) -> Modules:
        return {"model": build_model(model_file, training, home)}

    modules = build(CPU) if dist.get_rank() == 0 else without_memory(build)
    agree({"the tensors of the model": digest_of(modules)})
    model = modules["model"]
    whole = dict(model.named_parameters())
    flats: dict[str, list[FlatLayer]] = {}
    for stage in stages:
        taken = {name: whole.pop(name) for name in list(whole) if stage.parameters is None or name in stage.parameters}
        for layout in layouts_of(taken, numbered(model, stage.paths), stage.cell):
            flat = _flat(model, layout, device, kept=dist.get_rank() in stage.ranks)
            if flat is not None:
                flats.setdefault(stage.name, []).append(flat)
    for name, parameter in whole.items():
        if own is not None and name not in own:
            pass_on(parameter, device)
            continue
        home = torch.empty_like(parameter, device=device) if parameter.is_meta else parameter.detach().to(device)
        broadcast(home)
        put_in_place(parameter, home)
    for buffer in list(model.buffers()):
        home = buffer.detach().to(device) if buffer.device.type != "meta" else torch.empty_like(buffer, device=device)
        broadcast(home)
        put_in_place(buffer, home)
    model.to(device)  # what is no tensor of the module, such as a device that it remembers
    share_random_state()
    return model, flats


def numbered(model: nn.Module, paths: Sequence[str]) -> dict[str, int]:
    """The layer of every parameter; the last number for one that lies in no layer, or in several."""
    layers = layer_of_parameters(model, paths, frozen=True)
    return {name: len(paths) if layer is None else layer for name, layer in layers.items()}


def _flat(model: nn.Module, layout: FlatLayout, device: torch.device, *, kept: bool) -> FlatLayer | None:
    """One flat tensor with the values of rank 0; None where this rank keeps nothing of it."""
    member = dist.get_rank() % layout.ranks
    shard = torch.zeros(layout.shard_size, dtype=layout.dtype, device=device)
    pieces = {piece.slot.name: piece for piece in layout.pieces(member)}
    parameters: Mapping[str, Tensor] = dict(model.named_parameters())
    for slot in layout.slots:
        source = parameters[slot.name].detach()
        value = torch.empty(slot.shape, dtype=layout.dtype, device=device)
        if dist.get_rank() == 0:
            value.copy_(source)
        broadcast(value)
        if (piece := pieces.get(slot.name)) is not None:
            shard[piece.place : piece.place + piece.size] = value.reshape(-1)[piece.start : piece.start + piece.size]
        if not kept:
            leave_out(model.get_parameter(slot.name), device)
    if not kept:
        return None
    return FlatLayer.of(layout, shard, {slot.name: model.get_parameter(slot.name) for slot in layout.slots}, member)
