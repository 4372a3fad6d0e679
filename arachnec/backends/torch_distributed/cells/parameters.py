"""A model in cells on one rank: its shards, its groups, and what the executor asks of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arachnec.backends.torch_distributed.cells.flat_layer import FlatLayer
from arachnec.backends.torch_distributed.cells.gathering import Gathering
from arachnec.backends.torch_distributed.cells.gradients import ShardGradients
from arachnec.backends.torch_distributed.cells.weights import dealt_out_model
from arachnec.checkpoint.parts import Part, part_of
from arachnec.executable.training_options import Training
from arachnec.ir.gradient_buckets import layers_of
from arachnec.ir.nodes import Module, Stage
from arachnec.ir.parameter_cells import cell_of, own_cell
from arachnec.kernels.attention.process_groups import ProcessGroups
from arachnec.launch.timeouts import GROUP_TIMEOUT
from arachnec.models.file import ModelFile


@dataclass(frozen=True)
class CellParameters:
    """``cell`` is the group of this rank's cell, ``hosts`` that of all hosts."""

    flats: tuple[FlatLayer, ...]
    gathering: Gathering
    cell: dist.ProcessGroup
    hosts: dist.ProcessGroup | None

    @classmethod
    def of(
        cls, model_file: ModelFile, training: Training, device: torch.device, stage: Stage
    ) -> tuple[nn.Module, CellParameters]:
        """The model, its parameters dealt out as the stage says. Collective."""
        size = cell_of(stage) or 1
        rank, world = dist.get_rank(), dist.get_world_size()
        groups, hosts = ProcessGroups(GROUP_TIMEOUT), ProcessGroups(GROUP_TIMEOUT)
        groups.ensure([own_cell(first, size) for first in range(0, world, size)], device=device)
        hosts.ensure([tuple(range(world))], device=torch.device("cpu"))
        cell = groups.get(own_cell(rank, size))
        assert cell is not None, "a cell has several ranks"
        paths = [path for path, _ in layers_of(stage)]
        model, flats = dealt_out_model(model_file, training, device, paths, size)
        by_layer: dict[int, list[FlatLayer]] = {}
        for flat in flats:
            by_layer.setdefault(flat.layout.layer, []).append(flat)
        modules = {number: model.get_submodule(path) for number, path in enumerate(paths)}
        return model, cls(tuple(flats), Gathering(by_layer, modules, cell), cell, hosts.get(tuple(range(world))))

    @property
    def pieces(self) -> dict[str, Tensor]:
        """What this rank has of every parameter that trains: flat, what the optimizer updates."""
        return {name: piece for flat in self.flats if flat.layout.trained for name, piece in flat.pieces.items()}

    @property
    def layers(self) -> dict[str, int]:
        """The layer of every one of them."""
        return {name: flat.layout.layer for flat in self.flats if flat.layout.trained for name in flat.pieces}

    def gradients(self, groups: ProcessGroups, piece_bytes: int) -> ShardGradients:
        """The gradients of one iteration."""
        return ShardGradients(self.flats, self.cell, groups, self.hosts, piece_bytes)

    def parts(self, state: Mapping[str, Tensor | Part]) -> dict[str, Tensor | Part]:
        """The optimizer's state by ``kind/name``, each tensor of a piece as a part of its parameter's.

        Of the cells, which hold the same, the first writes them, but for what the optimizer deals out over the cells.
        """
        member = dist.get_rank(self.cell)
        first = dist.get_rank() == member  # of this rank, its cell is the first
        pieces = {piece.slot.name: piece for flat in self.flats for piece in flat.layout.pieces(member)}
        parts: dict[str, Tensor | Part] = {}
        for key, value in state.items():
            kind, _, name = key.partition("/")
            piece, part = pieces[name], part_of(value)
            writes = part.writes if isinstance(value, Part) else first  # a part is no other cell's
            if kind == "step":
                parts[key] = Part(part.values, 0, 1, writes=writes and piece.start == 0)
            else:
                parts[key] = Part(part.values, piece.start + part.first, piece.slot.size, writes=writes)
        return parts


def dealt_out_stage(module: Module) -> Stage | None:
    """The trained stage where its parameters are dealt out over cells, else None."""
    return next((stage for stage in module.stages if stage.trained and cell_of(stage)), None)
