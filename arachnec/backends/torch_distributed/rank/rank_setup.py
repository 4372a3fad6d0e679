"""What a rank has before its first step: the model's weights, the optimizer's state, process groups, threads.

In: a model file, training options and the first program. Out: a ``RankContext``. What it holds is laid out as the
stages of that program say: whole, dealt out over cells, cut into stages, in host memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from arachnec.analysis.communicators import ALWAYS, MOST_COMMUNICATORS
from arachnec.backends.cascade_step import in_step, trained_parameters
from arachnec.backends.torch_distributed.batches.load_ahead import LoadAhead
from arachnec.backends.torch_distributed.rank.cell_parameters import CellParameters, dealt_out_stage
from arachnec.backends.torch_distributed.rank.pipeline_rank import PipelineRank
from arachnec.backends.torch_distributed.rank.rank_context import RankContext
from arachnec.backends.torch_distributed.rank.whole_parameters import whole_parameters
from arachnec.backends.torch_distributed.weights.encoder_setup import rank_encoders
from arachnec.backends.torch_distributed.weights.shared_weights import given_module
from arachnec.backends.torch_distributed.weights.streamed_weights import own_model
from arachnec.data.clip import VideoClip
from arachnec.executable.training_options import Training
from arachnec.ir.host_placement import in_host, layers_in_host, optimizer_in_host
from arachnec.ir.nodes import Module
from arachnec.ir.parameter_cells import replicas
from arachnec.kernels.attention.process_groups import ProcessGroups
from arachnec.launch.phases import GROUP_TIMEOUT
from arachnec.model_state.kept_gradients import keep_gradients
from arachnec.model_state.optimizer import Optimizer
from arachnec.model_state.updated_parameters import layers_of_stages, updated_parameters
from arachnec.models.encoders import running_encoders
from arachnec.models.file import ModelFile
from arachnec.optimizers.proved_state import demand_whole_tensors, recipe_for
from arachnec.runtime.device_runtime import DeviceRuntime
from arachnec.runtime.handoffs import HandoffConnections
from arachnec.runtime.host_copies import HostCopies, HostMasters
from arachnec.runtime.rank_resources import RankThreads, family_groups, wanted_gradient_groups
from arachnec.runtime.replanning import HandoffNotes
from arachnec.tracing.captions_read import demand_captions_read
from arachnec.tracing.sample import meta_encoders
from arachnec.tracing.timesteps_read import demand_timesteps_read


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
    copies = _host_copies(first, runtime, cells)
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


def _host_copies(module: Module, runtime: DeviceRuntime, cells: CellParameters | None) -> HostCopies | None:
    """The copies with the host's memory; None where nothing of the model lies there."""
    if cells is not None and cells.copies is not None:
        return cells.copies
    return HostCopies(runtime) if any(in_host(stage) for stage in module.stages) else None
