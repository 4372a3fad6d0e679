"""A model in cells on one rank: its shards, its groups, and what the executor asks of both."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arachnec.backends.cascade_step import trained_parameters
from arachnec.backends.torch_distributed.weights.dealt_out_model import DealtStage, dealt_out_model
from arachnec.backends.torch_distributed.weights.shared_weights import CPU
from arachnec.checkpoint.parts import Part, part_of
from arachnec.executable.training_options import Training
from arachnec.ir.host_placement import layers_in_host
from arachnec.ir.nodes import Module
from arachnec.ir.parameter_cells import cell_of, own_cell
from arachnec.ir.stage_sizes import layers_of
from arachnec.kernels.attention.process_groups import ProcessGroups
from arachnec.launch.phases import GROUP_TIMEOUT
from arachnec.model_state.cells.flat_layer import FlatLayer, Piece
from arachnec.model_state.cells.gathering import Gathering, Slots
from arachnec.model_state.cells.gradients import ShardGradients, StageCells
from arachnec.model_state.gradients import GradientSynchronisation
from arachnec.models.file import ModelFile
from arachnec.runtime.device_runtime import DeviceRuntime
from arachnec.runtime.host_copies import HostCopies


@dataclass(frozen=True)
class CellParameters:
    """``stages`` are those that this rank has shards of, ``whole`` what trains on it and is not dealt out."""

    stages: Mapping[str, StageCells]
    whole: Mapping[str, Tensor]
    groups: tuple[ProcessGroups, ...]  # of the cells, and of the hosts of a stage's ranks
    slots: Slots  # that the stages' layers are whole in
    copies: HostCopies | None = None  # with the host's memory, where layers lie in it

    @classmethod
    def of(
        cls,
        model_file: ModelFile,
        training: Training,
        device: torch.device,
        stages: Sequence[DealtStage],
        own: Collection[str] | None = None,
        init: Path | None = None,
    ) -> tuple[nn.Module, CellParameters]:
        """The model, its parameters dealt out as the stages say; ``own`` is what is whole on this rank, ``init`` the
        folder of the weights that it begins with. Collective."""
        groups, hosts = ProcessGroups(GROUP_TIMEOUT), ProcessGroups(GROUP_TIMEOUT)
        cells = [own_cell(rank, stage.cell) for stage in stages for rank in stage.ranks]
        groups.ensure(list(dict.fromkeys(cells)), device=device)
        hosts.ensure([stage.ranks for stage in stages], device=CPU)
        copies = HostCopies(DeviceRuntime.of(device)) if any(stage.in_host for stage in stages) else None
        model, flats, slots = dealt_out_model(model_file, training, device, stages, own, copies, init)
        here = {stage.name: stage for stage in stages if stage.name in flats}
        dealt = {name: _stage_cells(stage, model, flats[name], slots, groups, hosts) for name, stage in here.items()}
        sharded = {slot.name for of in flats.values() for flat in of for slot in flat.layout.slots}
        whole = {name: value for name, value in trained_parameters(model).items() if name not in sharded}
        return model, cls(dealt, whole, (groups, hosts), slots, copies)

    @property
    def pieces(self) -> dict[str, Tensor]:
        """What this rank has of every parameter that trains, flat where it is dealt out: what the optimizer updates."""
        flats = (flat for stage in self.stages.values() for flat in stage.trained)
        return {**self.whole, **{name: piece for flat in flats for name, piece in flat.pieces.items()}}

    @property
    def layers(self) -> dict[str, dict[str, int | None]]:
        """By stage, the layer of each of the pieces."""
        return {
            name: {piece: flat.layout.layer for flat in stage.trained for piece in flat.pieces}
            for name, stage in self.stages.items()
        }

    def gradients(
        self, groups: ProcessGroups, whole: GradientSynchronisation, piece_bytes: int, *, goes_on: bool = False
    ) -> ShardGradients:
        """The gradients of one iteration; ``whole`` are those of what is not dealt out. Where it ``goes_on`` they are
        added to those of the iteration before."""
        return ShardGradients(self.stages, groups, whole, piece_bytes, goes_on)

    def parts(self, state: Mapping[str, Tensor | Part]) -> dict[str, Tensor | Part]:
        """The optimizer's state by ``kind/name``, each tensor of a piece as a part of its parameter's.

        Of the cells, which hold the same, the first writes them, but for what the optimizer deals out over the cells.
        """
        pieces: dict[str, tuple[Piece, bool]] = {}
        for stage in self.stages.values():
            member = 0 if stage.cell is None else dist.get_rank(stage.cell)
            first = dist.get_rank() == stage.ranks[0] + member
            pieces |= {p.slot.name: (p, first) for flat in stage.flats for p in flat.layout.pieces(member)}
        parts: dict[str, Tensor | Part] = {}
        for key, value in state.items():
            kind, _, name = key.partition("/")
            if name not in pieces:
                parts[key] = value
                continue
            (piece, first), part = pieces[name], part_of(value)
            writes = part.writes if isinstance(value, Part) else first  # a part is no other cell's
            if kind.partition(".")[0] == "step":  # a scalar of the whole parameter
                parts[key] = Part(part.values, 0, 1, writes=writes and piece.start == 0)
            else:
                parts[key] = Part(part.values, piece.start + part.first, piece.slot.size, writes=writes)
        return parts


def _stage_cells(
    stage: DealtStage,
    model: nn.Module,
    flats: Sequence[FlatLayer],
    slots: Slots,
    groups: ProcessGroups,
    hosts: ProcessGroups,
) -> StageCells:
    cell = groups.get(own_cell(dist.get_rank(), stage.cell))
    by_layer: dict[int, list[FlatLayer]] = {}
    for flat in flats:
        by_layer.setdefault(flat.layout.layer, []).append(flat)
    modules = {number: model.get_submodule(path) for number, path in enumerate(stage.paths)}
    gathering = Gathering(by_layer, modules, cell, slots)
    return StageCells(stage.ranks, tuple(flats), gathering, cell, hosts.get(stage.ranks))


def dealt_out_stage(module: Module) -> DealtStage | None:
    """The trained stage of a model that is one stage where it is dealt out over cells, else None."""
    stage = next((s for s in module.stages if s.trained and cell_of(s) and "part_of" not in s.attrs), None)
    if stage is None:
        return None
    paths = tuple(path for path, _ in layers_of(stage))
    return DealtStage(
        stage.name, paths, None, tuple(range(len(module.programs))), cell_of(stage) or 1, layers_in_host(stage)
    )
