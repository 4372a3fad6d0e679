"""The front end: a model file and its clips become stages, block graphs, and the token count of every clip.

The model is built on the meta device, so that tracing allocates no weights; ``docs/tracing.md`` says how it is done.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from arachnec.data.clip import VideoClip
from arachnec.data.encoded_file import encoded_beforehand
from arachnec.ir.diagnostic import UserError, counted
from arachnec.ir.long_computations import Reporter, unreported
from arachnec.ir.nodes import Clip, Cluster, Graph, Level, Module, Stage
from arachnec.ir.values import Attributes
from arachnec.spmd.exchanges import exchange_attributes
from arachnec.spmd.spatial.division import divided_stage
from arachnec.spmd.specialise import Graphs, recorded_model, specialise
from arachnec.spmd.tensor_parallel.division import with_width
from arachnec.tracing.blocks import CapturedModel
from arachnec.tracing.captured import forwards_of_shapes
from arachnec.tracing.clip_trials import Reached, run_clip, sizes_of
from arachnec.tracing.cost import encoder_stage, spread, trained_stage
from arachnec.tracing.errors import cannot_on_meta, cannot_take_error
from arachnec.tracing.find import find_blocks
from arachnec.tracing.graph import block_graph
from arachnec.tracing.measured_stage import measured_stage
from arachnec.tracing.record import ExampleCall, Repeats, flatten_call, is_meta
from arachnec.tracing.sample import ModelSource, arguments_of, meta_encoders

TRAINED = "dit"
TRY_S = 60.0  # of compiling, for running the model at the clips' shapes

Shape = tuple[int, int, int, int]  # frames, height, width, text tokens


@dataclass(frozen=True, eq=False)
class Trace:
    """What is known of a model before it has weights. ``model`` is on the device it was traced on."""

    stages: tuple[Stage, ...]
    graphs: tuple[Graph, ...]
    captured: CapturedModel
    counter: TokenCounter
    warnings: tuple[str, ...] = ()  # what sharing a clip among ranks costs apart from attention
    limits: tuple[str, ...] = ()  # notes of the videos; what it costs that one graph does not serve all clips

    def tokens(self, clip: VideoClip) -> int:
        """S of one clip: the tokens that the first block is given. Raises ``UserError`` if it is refused."""
        return self.counter(clip)

    @property
    def untried(self) -> tuple[Shape, ...]:
        """The clip shapes for which there was no time. A run tries them in the background."""
        return tuple(sorted(self.counter.untried)) if is_meta(self.counter.model) else ()

    @property
    def unknowns(self) -> tuple[str, ...]:
        """What compiling did not try, in a line; none where every clip shape ran through the whole model."""
        count = len(self.counter.untried)
        if not count:
            return ()
        then = "a run tries the rest in the background, before their step"
        if not self.untried:
            then = "what the model does behind it is first tried in their step"
        return (f"{counted(count, 'clip shape')} ran up to the first block only: {then}",)


def traced_module(traced: Trace, iterations: Sequence[Sequence[VideoClip]], cluster: Cluster) -> Module:
    """Every clip of these global batches as one module; a clip's id in the IR is its position in all of them."""
    clips: list[Clip] = []
    for number, iteration in enumerate(iterations):
        for clip in iteration:
            attrs = Attributes.of(name=clip.name, iteration=number)
            sizes = clip.frames, clip.height, clip.width, clip.text_tokens, traced.tokens(clip)
            clips.append(Clip(len(clips), *sizes, attrs))
    return Module("manifest", Level.TRACED, cluster, tuple(clips), traced.stages, traced.graphs)


@dataclass
class TokenCounter:
    """Runs the model for every distinct clip shape, shapes only, and reads S where the first block is given it.

    On the meta device the whole model runs, blocks by the shapes of their graphs, until ``most_s`` seconds are over;
    from then on, and where it would compute, up to the first block. ``untried`` are the shapes of which that is all.
    """

    model: nn.Module
    captured: CapturedModel
    source: ModelSource
    encoders: dict[str, nn.Module]
    most_s: float = field(default_factory=lambda: TRY_S)
    counts: dict[Shape, int] = field(default_factory=dict)
    untried: set[Shape] = field(default_factory=set)
    _spent: float = 0.0
    _repeats: Repeats | None = None

    def __call__(self, clip: VideoClip) -> int:
        if clip.shape not in self.counts:
            whole = is_meta(self.model) and self._spent < self.most_s
            started = time.perf_counter()
            self.counts[clip.shape] = self.run(clip, whole=whole)
            self._spent += time.perf_counter() - started
            if not whole:
                self.untried.add(clip.shape)
        return self.counts[clip.shape]

    def _whole_model(self) -> Repeats:
        if self._repeats is None:
            forwards = forwards_of_shapes(self.model, self.captured)
            self._repeats = Repeats(self.model, find_blocks(self.model), forwards=forwards)
        return self._repeats

    def try_all(self, clips: Sequence[VideoClip]) -> None:
        """From now on run the whole model at every shape, and at once at those of ``clips`` that had no time."""
        self.most_s = math.inf
        for clip in clips:
            if clip.shape in self.untried and is_meta(self.model):
                self.untried.remove(clip.shape)
                self.counts[clip.shape] = self.run(clip, whole=True)

    def run(self, clip: VideoClip, *, whole: bool) -> int:
        """S of a clip. Raises ``UserError``, which names it, where the model cannot take it."""
        place = self.captured.tokens_at
        counted: list[int] = []

        def read(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            leaves, _ = flatten_call(module, args, kwargs)
            counted.append(place.count(leaves, 1))
            if counted[0] < 1 or not whole:
                raise Reached

        handle = self.model.get_submodule(place.path).register_forward_pre_hook(read, with_kwargs=True)
        try:
            run_clip(self.model, self.source, self.encoders, clip, self._whole_model() if whole else None)
        finally:
            handle.remove()
        if not counted or counted[0] < 1:
            reason = "the first block is given no tokens"
            raise cannot_take_error(None, clip.name, sizes_of(clip), clip.text_tokens, reason)
        return counted[0]


def trace_model(
    source: ModelSource,
    clips: Sequence[VideoClip],
    *,
    meta: bool = True,
    gradients: bool = True,
    gpu: bool = False,
    reporter: Reporter = unreported,
) -> Trace:
    """Trace a model file's transformer and its encoders for these clips.

    ``meta`` builds on the meta device; without it, or where the model's forward cannot run there, the model is built
    where its ``build`` puts it. Without ``gradients`` it only runs forward, and none are verified. ``gpu``: memory is
    that of a GPU's kernels. Raises ``UserError`` for a model that cannot be traced.
    """
    trace = partial(_trace, source, clips, gradients, gpu, reporter)
    reporter("tracing")
    return _where_it_runs(source, trace) if meta else trace(source.build())


def trace_encoders(source: ModelSource, clips: Sequence[VideoClip]) -> Trace:
    """Trace a model file's encoders alone: the transformer has no stage, and runs only to count the clips' tokens.

    Raises ``UserError`` for a model that cannot be run.
    """
    return _where_it_runs(source, partial(_trace_encoders, source, clips))


def _where_it_runs(source: ModelSource, trace: Callable[[nn.Module], Trace]) -> Trace:
    """A trace of the model on the meta device, or where its ``build`` puts it: it reads numbers, or asks torch what
    the meta device does not answer."""
    with torch.device("meta"):
        model = source.build()
    try:
        return trace(model)
    except UserError as refusal:
        if not cannot_on_meta(refusal):
            raise
    return trace(source.build())


def _trace_encoders(source: ModelSource, clips: Sequence[VideoClip], model: nn.Module) -> Trace:
    encoders = meta_encoders(source)
    captured = recorded_model(model, source, clips, encoders)
    counter = TokenCounter(model, captured, source, encoders)
    frozen, whole = _encoder_stages(encoders, clips, counter)
    return Trace(frozen, (), captured, counter, whole)


def _trace(
    source: ModelSource,
    clips: Sequence[VideoClip],
    gradients: bool,
    gpu: bool,
    reporter: Reporter,
    model: nn.Module,
) -> Trace:
    encoders = meta_encoders(source)
    special = specialise(model, source, clips, encoders, gradients=gradients, reporter=reporter)
    captured, calls = special.captured, special.calls
    counter = TokenCounter(model, captured, source, encoders)
    if special.step.graphs is Graphs.ONE and not captured.folded:
        trained = trained_stage(TRAINED, model, captured, calls, source=type(model).__name__, gpu=gpu)
    else:
        calls = (*calls, *_own_calls(model, source, clips, encoders, counter))
        trained = measured_stage(TRAINED, model, captured, calls, source=type(model).__name__)
    attributes = exchange_attributes(captured, special.shared) | special.step.attributes
    trained = replace(trained, attrs=trained.attrs.updated(**attributes))
    frozen, whole = _encoder_stages(encoders, clips, counter)
    # graphs of one clip shape are not those that run: nothing is fused in them
    one = special.step.graphs is Graphs.ONE
    graphs = tuple(block_graph(block) for block in captured.blocks) if one else ()
    return Trace((*frozen, trained), graphs, captured, counter, (*special.warnings, *whole), special.limits)


def _own_calls(
    model: nn.Module,
    source: ModelSource,
    clips: Sequence[VideoClip],
    encoders: dict[str, nn.Module],
    tokens: TokenCounter,
) -> list[ExampleCall]:
    """Some of the clips themselves, to measure at their sizes; none where that would compute."""
    if not is_meta(model):
        return []
    return [
        ExampleCall(
            arguments_of(source, clip, encoders, device="meta"),
            (clip.frames, clip.height, clip.width),
            1,
            clip.text_tokens,
        )
        for clip in spread(clips, tokens)
    ]


def _encoder_stages(
    encoders: Mapping[str, nn.Module], clips: Sequence[VideoClip], counter: TokenCounter
) -> tuple[tuple[Stage, ...], tuple[str, ...]]:
    """A stage for every encoder that runs, and why there are some whose clips no ranks can share."""
    beforehand = encoded_beforehand(clips)
    running = {name: encoder for name, encoder in encoders.items() if name not in beforehand}
    measured = {name: encoder_stage(name, encoder, clips, counter) for name, encoder in running.items()}
    divided = [
        divided_stage(with_width(measured[name], encoder, clips, counter), encoder, clips, counter)
        for name, encoder in running.items()
    ]
    return tuple(stage for stage, _ in divided), tuple(reason for _, reason in divided if reason is not None)
