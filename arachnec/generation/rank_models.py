"""The models of a rank that samples: those of its program, which are alike, and what a run taught their layers.

The plan has the densities, and which layers are ready; the projections are read where the model is.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from arachnec.checkpoint.trained_predictors import TrainedPredictors
from arachnec.codegen.fused_block import fuse_as_planned
from arachnec.data.clip import VideoClip
from arachnec.data.requests import Request
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.head_density import LayerDensity, density_rows, layer_densities, parts_by_layer, sparse_layers
from arachnec.ir.nodes import Cascade, Graph, Instruction, Module, Program, Stage, integer
from arachnec.ir.sampling import models_of
from arachnec.ir.stage_sizes import count_in, layers_of
from arachnec.ir.values import Symbol
from arachnec.kernels.attention.sequence_shard import SequenceShard
from arachnec.kernels.sparse.predictor import MASS, Projections
from arachnec.kernels.sparse.token_cubes import CELL
from arachnec.models.sampler_file import SamplerFile
from arachnec.planning.sparse_stages import ClassAttention, attentions_of
from arachnec.sparsity.clip_grid import token_grid
from arachnec.spmd.rewrite import shard_block
from arachnec.spmd.sharded_model import SequenceModel, install
from arachnec.spmd.sparse_layers import Layer, LayerState, SparseCascade
from arachnec.spmd.specialise import Graphs, Specialisation, captured_again, captured_at
from arachnec.tracing.captured import CapturedModel
from arachnec.tracing.errors import cannot_on_meta
from arachnec.tracing.find import structure
from arachnec.tracing.record import form_of_call
from arachnec.tracing.sample import arguments_of, meta_encoders

SITE = 0  # a block that can be sparse has one attention over the clip's tokens


def other_predictors_error(place: str, model: str, what: str) -> UserError:
    return user_error(
        f"the predictors in {place} are not of `{model}`: {what}",
        help="name the run that trained this model's; or take the model out of `predictors()`",
    )


def with_predictors(stage: Stage, graphs: Sequence[Graph], trained: TrainedPredictors) -> Stage:
    """A traced model with the layers whose predictors are ready, as ``learned``. Raises ``UserError`` for those of
    another model."""
    if "graphs" in stage.attrs:
        raise user_error(
            f"`{stage.name}` has predictors, and its blocks have a graph for each clip shape: none can be sparse",
            help="take the model out of `predictors()`",
        )
    known = attentions_of(stage, graphs)
    numbers = {path: number for number, (path, _) in enumerate(layers_of(stage)) if number in known}
    rows: dict[int, LayerDensity] = {}
    ranks: set[int] = set()
    for (path, site), layer in trained.layers.items():
        if path not in numbers or site != SITE:
            what = f"it has no attention over the clip's tokens in `{path}`"
            raise other_predictors_error(trained.place, stage.name, what)
        attention, share = known[numbers[path]]
        ranks.add(_rank(stage, trained, (path, site), attention))
        if layer.ready:
            rows[numbers[path]] = LayerDensity.of(share, layer.densities)
    if len(ranks) > 1:
        raise other_predictors_error(trained.place, stage.name, "they have several ranks")
    return replace(stage, attrs=stage.attrs.updated(learned=density_rows(rows), predictor_rank=ranks.pop()))


def _rank(stage: Stage, trained: TrainedPredictors, layer: Layer, attention: ClassAttention) -> int:
    """Of one layer's predictor, held to the model's heads."""
    heads, features = len(trained.layers[layer].densities.heads), trained.features(layer)
    rank, rest = divmod(features, attention.heads * attention.size)
    if heads != attention.heads:
        what = f"`{layer[0]}` has {heads} heads there, and {attention.heads} here"
    elif rest or not 1 <= rank <= attention.size:
        what = f"those of `{layer[0]}` have {features} numbers, for {heads} heads of {attention.size} features"
    else:
        return rank
    raise other_predictors_error(trained.place, stage.name, what)


def learned_layers(sequence: SequenceModel, stage: Stage, trained: TrainedPredictors | None) -> dict[int, LayerState]:
    """Gives a model on a rank the predictors that its stage is planned with; the layers' states by their number.

    Raises ``UserError`` where they are not there any more, or are others than were planned with.
    """
    table, paths = layer_densities(stage), [path for path, _ in layers_of(stage)]
    names: dict[int, Layer] = {number: (paths[number], SITE) for number in table}
    if trained is None or any(name not in trained.layers for name in names.values()):
        place = "the sampler file" if trained is None else trained.place
        raise other_predictors_error(place, stage.name, "the plan has layers that are not there; compile again")
    rank = count_in(stage, "predictor_rank")
    states = sequence.sparsify(rank, here={path for path, _ in names.values()})
    layers: dict[int, LayerState] = {}
    for number, name in names.items():
        if name not in states:
            what = f"the attention of `{name[0]}`, as it runs, cannot be sparse"
            raise other_predictors_error(trained.place, stage.name, what)
        site, own = states[name].site, states[name].projections
        query, key = trained.projections(name, (site.heads, site.head_size, rank))
        by = Projections(query.to(own.query.device), key.to(own.key.device))
        layers[number] = replace(states[name], projections=by, densities=table[number].heads, sparse=True)
    return layers


def sparse_attention(
    stage: Stage, layers: Mapping[int, LayerState], cascade: Cascade, clip: VideoClip, ranks: int
) -> SparseCascade | None:
    """The sparse attention of a segment's forwards on so many ranks, with the densities of its clips' class of length;
    None for a segment that is dense."""
    numbers = sparse_layers(cascade)
    if not numbers:
        return None
    paths, densities = [path for path, _ in layers_of(stage)], layer_densities(stage)
    own = {n: replace(layers[n], densities=densities[n].at(cascade.tokens).heads) for n in numbers}
    queries, keys = count_in(stage, "query_group"), count_in(stage, "key_block")
    mass = stage.attrs.get("mass", MASS)
    assert isinstance(mass, int | float)
    divided = parts_by_layer(cascade) if ranks == cascade.degree else {}
    return SparseCascade(
        {(paths[number], SITE): state for number, state in own.items()},
        token_grid(cascade.tokens, clip.frames, clip.height, clip.width),
        (),
        sizes=(queries, keys, min(CELL, queries, keys)),
        mass=float(mass),
        parts={(paths[number], SITE): parts for number, parts in divided.items()},
        groups=integer(cascade.attrs.get("groups", 0)),
    )


def model_kind(sampler: SamplerFile, name: str, clips: Sequence[VideoClip]) -> Hashable:
    """Equal for models of one structure that are called alike; the name of one that cannot be built or called so."""
    file = sampler.model_file(name)
    try:
        with torch.device("meta"):
            model = sampler.build(name)
        encoders = meta_encoders(file)
        shapes = {clip.shape: clip for clip in clips}.values()
        calls = [arguments_of(file, clip, encoders, device="meta") for clip in shapes]
    except Exception:
        return name  # tracing says what is wrong, and where
    return structure(model), tuple(form_of_call(call) for call in calls)


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
