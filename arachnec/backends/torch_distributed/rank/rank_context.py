"""What a rank has before its first step and keeps: its model, its optimizer, its groups, its threads.

In: a model file, training options and the first program. Out: a ``RankContext``. What it holds is laid out as the
stages of that program say: whole, dealt out over cells, cut into stages, in host memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from arachnec.analysis.communicators import ALWAYS, MOST_COMMUNICATORS
from arachnec.analysis.gathers import layers_listed
from arachnec.backends.cascade_step import in_step, trained_parameters
from arachnec.backends.torch_distributed.batches.load_ahead import LoadAhead
from arachnec.backends.torch_distributed.rank.cell_parameters import CellParameters, dealt_out_stage
from arachnec.backends.torch_distributed.rank.pipeline_rank import PipelineRank
from arachnec.backends.torch_distributed.weights.encoder_setup import DividedEncoders, rank_encoders
from arachnec.backends.torch_distributed.weights.shared_weights import given_module
from arachnec.backends.torch_distributed.weights.streamed_weights import own_model
from arachnec.data.clip import VideoClip
from arachnec.executable.training_options import Training
from arachnec.ir.host_placement import in_host, layers_in_host, optimizer_in_host
from arachnec.ir.nodes import Instruction, Module
from arachnec.ir.parameter_cells import GIB, own_cell, replicas
from arachnec.kernels.attention.process_groups import ProcessGroups
from arachnec.kernels.attention.sequence_shard import SequenceShard
from arachnec.launch.phases import GROUP_TIMEOUT
from arachnec.model_state.kept_gradients import keep_gradients
from arachnec.model_state.optimizer import Optimizer
from arachnec.model_state.sparse_predictors import SparsePredictors
from arachnec.model_state.updated_parameters import UpdatedParameters, layers_of_stages, updated_parameters
from arachnec.models.encoders import running_encoders
from arachnec.models.file import ModelFile
from arachnec.optimizers.kept_state import demand_whole_tensors, recipe_for
from arachnec.runtime.device_runtime import DeviceRuntime
from arachnec.runtime.handoffs import HandoffConnections, handoff_pairs
from arachnec.runtime.host_copies import HostCopies, HostInputs, HostMasters
from arachnec.runtime.rank_resources import RankThreads, family_groups, wanted_gradient_groups, wanted_groups
from arachnec.runtime.replanning import HandoffNotes
from arachnec.spmd.sharded_model import InputsAway
from arachnec.spmd.sparse_layers import Layer, LayerState, SparseCascade
from arachnec.tracing.sample import meta_encoders
from arachnec.tracing.sample_reads import demand_captions_read, demand_timesteps_read
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


def whole_parameters(
    parameters: Mapping[str, Tensor], cells: CellParameters | None, pipeline: PipelineRank | None
) -> Mapping[str, Tensor]:
    """All parameters of the model that train, by name, whole; on the meta device where this rank has not all."""
    if pipeline is not None:
        return trained_parameters(pipeline.cuts.model)
    if cells is None:
        return parameters
    flats = (flat for stage in cells.stages.values() for flat in stage.trained)
    slots = {
        slot.name: torch.empty(slot.shape, dtype=flat.layout.dtype, device="meta")
        for flat in flats
        for slot in flat.layout.slots
    }
    return {**cells.whole, **slots}


def set_up_rank(
    model_file: ModelFile,
    training: Training,
    first: Module,
    clips: Sequence[VideoClip],
    device: torch.device,
    *,
    init: Path | None = None,
    follows_links: bool = False,
) -> RankContext:
    """Everything that stays from step to step. Collective.

    ``clips`` are examples that the model takes, ``init`` is a folder of weights to begin with; ``follows_links`` notes
    what handoffs take. Raises ``UserError`` where the model cannot be built, the ranks' models differ, or ``init`` has
    another model's weights.
    """
    rank, runtime = dist.get_rank(), DeviceRuntime.of(device)
    pipeline = PipelineRank.of(model_file, training, first, clips, rank)
    stage, own = dealt_out_stage(first), None if pipeline is None else pipeline.own
    dealt_out = pipeline.dealt_out if pipeline is not None else () if stage is None else (stage,)
    cells: CellParameters | None = None
    if dealt_out:
        model, cells = CellParameters.of(model_file, training, device, dealt_out, own, init)
    elif own is None and model_file.module is not None:
        model = given_module(model_file.module, training, device, init)
    else:
        model = own_model(model_file, training, device, own, init)
    running = running_encoders(model_file, [stage.name for stage in first.stages if not stage.trained])
    encoders, divided = rank_encoders(running, training, first, clips[0], device, init)
    planned = meta_encoders(model_file)
    demand_timesteps_read(model_file, training.timesteps, clips[0], planned, model_file.span("sample"))
    demand_captions_read(training.caption_dropout, clips, planned)
    parameters = trained_parameters(model)
    recipe = recipe_for(whole_parameters(parameters, cells, pipeline), model_file, training)
    demand_whole_tensors(first, recipe)
    keep_gradients(parameters if cells is None else parameters | cells.pieces, first)
    gradient_groups = ProcessGroups(GROUP_TIMEOUT)
    gradient_groups.ensure(wanted_gradient_groups(first), device=device)
    sharded = dist.get_world_size() > 1 and any("sharded" in stage.attrs for stage in first.stages)
    copies = None if cells is None else cells.copies
    if copies is None and any(in_host(stage) for stage in first.stages):
        copies = HostCopies(runtime)
    masters = copies is not None and any(optimizer_in_host(s) and not layers_in_host(s) for s in first.stages)
    place = None if pipeline is None else pipeline.place
    if stage is not None and sharded and pipeline is None:
        place = replicas(rank, stage.cell, stage.ranks)
    optimizer = Optimizer(
        parameters if cells is None else cells.pieces,
        training,
        sharded=sharded if pipeline is None else place is not None,
        group=None if place is None else gradient_groups.get(place),
        host=HostMasters(copies) if masters and copies is not None else None,
        on_host=cells is not None and cells.copies is not None,
        recipe=recipe,
    )
    threads = RankThreads()
    context = RankContext(
        rank=rank,
        runtime=runtime,
        model_file=model_file,
        model=model,
        parameters=parameters,
        encoders=encoders,
        sequence=None,
        optimizer=optimizer,
        groups=ProcessGroups(GROUP_TIMEOUT, most=MOST_COMMUNICATORS - ALWAYS),
        gradient_groups=gradient_groups,
        host_groups=ProcessGroups(GROUP_TIMEOUT),
        connections=HandoffConnections(timeout=GROUP_TIMEOUT),
        threads=threads,
        loads=LoadAhead(threads.loads, encoders, runtime, in_step=lambda clip, step: in_step(training, clip, step)),
        training=training,
        cells=cells,
        pipeline=pipeline,
        host_copies=copies,
        notes=HandoffNotes() if follows_links else None,
        divided=divided,
    )
    layers: Mapping[str, Mapping[str, int | None]]
    layers = layers_of_stages(first, model, parameters) if pipeline is None else pipeline.updated
    gathering = {}
    if cells is not None and pipeline is None:
        layers, gathering = cells.layers, {name: stage.gathering for name, stage in cells.stages.items()}
    context = replace(context, updated=updated_parameters(layers, first, model, optimizer, gathering))
    context.groups.ensure(family_groups(first), device=device)
    return context
