"""The models of one rank: those that its program runs, and no others; able to share a sequence where it does."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from arachnec.codegen.planned_fusion import fuse_as_planned
from arachnec.data.clip import VideoClip
from arachnec.data.requests import Request
from arachnec.generation.learned_layers import learned_layers, sparse_attention
from arachnec.generation.model_kind import model_kind
from arachnec.ir.diagnostic import UserError
from arachnec.ir.head_density import layer_densities, sparse_layers
from arachnec.ir.nodes import Cascade, Graph, Instruction, Module, Program, Stage, integer
from arachnec.ir.sampling import models_of
from arachnec.ir.values import Symbol
from arachnec.kernels.attention.sequence_shard import SequenceShard
from arachnec.models.sampler_file import SamplerFile
from arachnec.spmd.rewrite import shard_block
from arachnec.spmd.sharded_model import SequenceModel, install
from arachnec.spmd.sparse_layers import LayerState
from arachnec.spmd.specialisation import Graphs, Specialisation
from arachnec.spmd.specialise import captured_again, captured_at
from arachnec.tracing.captured import CapturedModel
from arachnec.tracing.errors import cannot_on_meta


def is_shared(step: Instruction) -> bool:
    """Whether one branch of this denoise has several ranks."""
    return step.op == "denoise" and len(step.peers) > integer(step.attrs.get("side", 1))


def fused_graphs(module: Module, stage: Stage) -> tuple[Graph, ...]:
    """The graphs of a model's blocks, where ``fuse`` has found regions in some."""
    rows = stage.attrs.get("blocks", ())
    assert isinstance(rows, tuple)
    names = {row[0].name for row in rows if isinstance(row, tuple) and isinstance(row[0], Symbol)}
    graphs = tuple(graph for graph in module.graphs if graph.name in names)
    return graphs if any(graph.fused for graph in graphs) else ()


@dataclass
class RankModels:
    """Modules by name, built when they are first asked for."""

    sampler: SamplerFile
    device: torch.device
    _models: dict[str, nn.Module] = field(default_factory=dict)
    _sequences: dict[str, SequenceModel] = field(default_factory=dict)
    _layers: dict[str, dict[int, LayerState]] = field(default_factory=dict)  # that can be sparse, by model
    _graphs: dict[Hashable, CapturedModel] = field(default_factory=dict)  # recorded without values, by kind of model

    def __call__(self, name: str) -> nn.Module:
        if name not in self._models:
            self._models[name] = self.sampler.build(name).to(self.device).eval().requires_grad_(False)
        return self._models[name]

    def prepare(self, module: Module, program: Program, requests: Sequence[Request]) -> None:
        """Build what the program runs, and trace the blocks of what it shares."""
        cascades = {cascade.name: cascade for cascade in module.cascades}
        stages = {stage.name: stage for stage in module.stages}
        shapes: dict[str, dict[tuple[int, ...], VideoClip]] = {}
        for step in program.instructions:
            if step.op != "denoise":
                continue
            name = cascades[step.target].stage
            self(name)
            if is_shared(step) or fused_graphs(module, stages[name]) or sparse_layers(cascades[step.target]):
                clip = requests[cascades[step.target].clips[0]].clip()
                shapes.setdefault(name, {})[clip.shape] = clip
        for name, clips in shapes.items():
            if name not in self._sequences:
                self._install(name, stages[name], list(clips.values()), fused_graphs(module, stages[name]))

    def prepare_all(self, module: Module, requests: Sequence[Request]) -> None:
        """Build all models and trace their blocks at every shape: this rank may come to share any."""
        clips = {clip.shape: clip for clip in (request.clip() for request in requests)}
        for stage in module.stages:
            if stage.name in models_of(module):
                self(stage.name)
                if stage.name not in self._sequences and (len(module.programs) > 1 or layer_densities(stage)):
                    self._install(stage.name, stage, list(clips.values()), fused_graphs(module, stage))

    def sharing(
        self, stage: Stage, cascade: Cascade, clip: VideoClip, shard: SequenceShard | None
    ) -> Callable[[str], Callable[..., Any]]:
        """Forwards of a segment, by the model's name: on this rank's tokens, on all of them without a shard. Each
        chooses the keys of its sparse layers anew."""
        ranks = 1 if shard is None else shard.degree
        sparse = sparse_attention(stage, self._layers.get(stage.name, {}), cascade, clip, ranks)

        def forward(name: str, **arguments: Any) -> Any:
            if name not in self._sequences:
                return self(name)(**arguments)
            own = None if sparse is None else sparse.for_another_forward()
            with self._sequences[name].use(shard, sparse=own) as model:
                return model(**arguments)

        return lambda name: partial(forward, name)

    def _install(self, name: str, stage: Stage, clips: Sequence[VideoClip], fused: Sequence[Graph]) -> None:
        step = Specialisation.of(stage)
        how = fuse_as_planned(fused) if fused else None
        sequence = install(self(name), self._captured(name, step, clips), how)
        if step.graphs is Graphs.SHAPES:
            for clip in clips:
                captured = self._captured(name, step, clips, clip)
                sequence.add(captured, [shard_block(block) for block in captured.blocks])
        self._sequences[name] = sequence
        if layer_densities(stage):
            self._layers[name] = learned_layers(sequence, stage, self.sampler.trained_predictors(name))

    def _captured(
        self, name: str, step: Specialisation, clips: Sequence[VideoClip], at: VideoClip | None = None
    ) -> CapturedModel:
        """Recorded without values where the model can be, as for the plan; once for models of one kind."""
        kind = model_kind(self.sampler, name, clips), step, tuple(clip.shape for clip in clips), at and at.shape
        if kind in self._graphs:
            return self._graphs[kind]
        source = self.sampler.model_file(name)

        def capture(model: nn.Module) -> CapturedModel:
            if at is None:
                return captured_again(step, model, source, clips)
            return captured_at(step, at, model, source, clips)

        with torch.device("meta"):
            shapes = self.sampler.build(name)
        try:
            self._graphs[kind] = capture(shapes)
            return self._graphs[kind]
        except UserError as refusal:
            if not cannot_on_meta(refusal):
                raise
        return capture(self(name))
