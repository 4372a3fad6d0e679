"""What a rank keeps from step to step: its model, its optimizer, its groups, its threads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from arachnec.analysis.gathers import layers_listed
from arachnec.backends.torch_distributed.batches.load_ahead import LoadAhead
from arachnec.backends.torch_distributed.rank.cell_parameters import CellParameters
from arachnec.backends.torch_distributed.rank.pipeline_rank import PipelineRank
from arachnec.backends.torch_distributed.weights.divided_encoders import DividedEncoders
from arachnec.executable.training_options import Training
from arachnec.ir.nodes import Instruction, Module
from arachnec.ir.parameter_cells import GIB, own_cell
from arachnec.kernels.attention.process_groups import ProcessGroups
from arachnec.kernels.attention.sequence_shard import SequenceShard
from arachnec.model_state.optimizer import Optimizer
from arachnec.model_state.sparse_predictors import SparsePredictors
from arachnec.model_state.updated_parameters import UpdatedParameters
from arachnec.models.file import ModelFile
from arachnec.runtime.device_runtime import DeviceRuntime
from arachnec.runtime.handoffs import HandoffConnections, handoff_pairs
from arachnec.runtime.host_copies import HostCopies, HostInputs
from arachnec.runtime.rank_resources import RankThreads, wanted_gradient_groups, wanted_groups
from arachnec.runtime.replanning import HandoffNotes
from arachnec.spmd.block_forward import InputsAway
from arachnec.spmd.sparse_layers import Layer, LayerState, SparseCascade
from arachnec.verification.host_memory import host_peak


class SequenceParallel(Protocol):
    """A model whose blocks can run on a shard of the tokens: ``arachnec.spmd.sharded_model.SequenceModel``."""

    def use(
        self,
        shard: SequenceShard | None,
        recompute: bool | Set[str],
        recomputing: AbstractContextManager[object] | None = None,
        away: InputsAway | None = None,
        sparse: SparseCascade | None = None,
    ) -> AbstractContextManager[object]: ...

    def sparsify(self, rank: int, seed: int, here: Set[str] | None = None) -> dict[Layer, LayerState]: ...

    def token_dims(self, path: str) -> dict[int, int]: ...

    def of_tokens(self, local: Tensor, dim: int, length: int) -> Tensor: ...

    def own_tokens(self, value: Tensor, dim: int) -> Tensor: ...


@dataclass(frozen=True)
class RankContext:
    """What a rank keeps from step to step."""

    rank: int
    runtime: DeviceRuntime
    model_file: ModelFile
    model: nn.Module
    parameters: Mapping[str, Tensor]  # those that train, under the module's own names
    encoders: Mapping[str, nn.Module]
    sequence: SequenceParallel | None  # None: only degree 1 without recomputation
    optimizer: Optimizer
    groups: ProcessGroups
    gradient_groups: ProcessGroups  # of gradient all-reduces alone: they run beside the collectives of cascades
    host_groups: ProcessGroups  # of the same ranks, for the hosts' tensors
    connections: HandoffConnections
    threads: RankThreads
    loads: LoadAhead
    training: Training
    cells: CellParameters | None = None  # None: every rank holds all parameters
    pipeline: PipelineRank | None = None  # where the model is cut into stages
    notes: HandoffNotes | None = None  # where plans follow the links' measured speeds
    updated: Mapping[str, UpdatedParameters] = field(default_factory=dict)  # of stages whose optimizer is dealt out
    host_copies: HostCopies | None = None  # None: nothing of the model lies in the host's memory
    predictors: SparsePredictors | None = None  # of layers that attend to chosen keys
    divided: DividedEncoders = field(default_factory=DividedEncoders)

    @cached_property
    def host_inputs(self) -> HostInputs | None:
        """Where inputs of blocks are kept in the host's memory."""
        return None if self.host_copies is None else HostInputs(self.host_copies)

    @property
    def device(self) -> torch.device:
        return self.runtime.device

    def start_gathers(self, instructions: Iterable[Instruction]) -> None:
        """Start to gather what ranks have updated in parts, as the ``gather`` among them say. Collective."""
        for gather in instructions:
            if gather.op == "gather":
                group = self.gradient_groups.get(gather.peers)
                self.updated[gather.target].start(layers_listed(gather, "layers"), group)

    def reserve_host_memory(self, module: Module) -> None:
        """Lock what this rank's program keeps in its host's memory: within a step that would wait for the device."""
        if self.host_copies is None:
            return
        for stage in self.cells.stages.values() if self.cells is not None else ():
            for flat in stage.trained:
                flat.make_host_gradient()
        program = next(program for program in module.programs if program.rank == self.rank)
        _, inputs = host_peak(program, {cascade.name: cascade for cascade in module.cascades})
        self.host_copies.reserve(round(inputs * GIB))

    def connect(self, module: Module) -> None:
        """Make the process groups and connections of a module that earlier ones did not have. Collective."""
        self.groups.ensure(wanted_groups(module), device=self.device)
        self.gradient_groups.ensure(wanted_gradient_groups(module), device=self.device)
        self.host_groups.ensure(wanted_gradient_groups(module), device=torch.device("cpu"))
        self.connections.ensure(handoff_pairs(module.programs))

    def disconnect(self) -> None:
        """Give them up. Collective; nobody may still wait on one."""
        cells = () if self.cells is None else self.cells.groups
        for groups in (self.groups, self.gradient_groups, self.host_groups, *cells):
            groups.close()
        self.connections.close()

    def norm_group(self, ranks: tuple[int, ...]) -> ProcessGroup | None:
        """Where a norm over these ranks is summed: in their cell's group, or in that of their all-reduces."""
        for stage in self.cells.stages.values() if self.cells is not None else ():
            if own_cell(self.rank, stage.flats[0].layout.ranks) == ranks:
                return stage.cell
        return self.gradient_groups.get(ranks)
