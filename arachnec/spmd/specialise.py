"""The least special capture of a model. In: a model and its sample. Out: graphs, and the step that gave them.

The steps are tried in order (``spmd.specialisation``); the last refusal is the first one, which names the blocks' own
reason.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import UserError
from arachnec.ir.long_computations import Reporter, unreported
from arachnec.spmd.rewrite import ShardedBlock, gather_warnings, shard_block
from arachnec.spmd.specialisation import STEPS, STEPS_DOWN, Graphs, Specialisation, clips_mixed, costs
from arachnec.tracing import blocks, sample
from arachnec.tracing.blocks import CapturedModel
from arachnec.tracing.clip_trials import demand_clips_apart
from arachnec.tracing.errors import CannotRecord, cannot_on_meta
from arachnec.tracing.record import ExampleCall
from arachnec.tracing.sample import ModelSource


@dataclass(frozen=True, eq=False)
class SpecialisedModel:
    """A model's graphs, as general as they can be; ``limits``: what the step costs, ``warnings``: what is gathered."""

    step: Specialisation
    calls: tuple[ExampleCall, ...]
    captured: CapturedModel
    shared: tuple[ShardedBlock, ...]
    limits: tuple[str, ...]
    warnings: tuple[str, ...]


def specialise(
    model: nn.Module,
    source: ModelSource,
    clips: Sequence[VideoClip],
    encoders: Mapping[str, nn.Module],
    *,
    gradients: bool = True,
    reporter: Reporter = unreported,
) -> SpecialisedModel:
    """Raises ``UserError`` for a model that cannot be trained at any step, or without ``gradients`` not be run."""
    refusals: list[UserError] = []
    for step in STEPS:
        if step.clips is None and any(map(clips_mixed, refusals)):
            continue
        started = time.perf_counter()
        try:
            calls, captured, shared = _at(step, model, source, clips, encoders, gradients, reporter)
            seconds = time.perf_counter() - started
            untold = _demand_clips_apart(step, model, source, calls, clips, encoders)
        except UserError as refusal:
            if cannot_on_meta(refusal) or _final(refusal):
                raise
            if step.clips == 1 and _cannot_run(refusal):
                raise _first([*refusals, refusal]) from refusal
            refusals.append(refusal)
            continue
        limits, warnings = (*costs(step, refusals, seconds), *untold), gather_warnings(captured, shared)
        return SpecialisedModel(step, tuple(calls), captured, tuple(shared), limits, warnings)
    raise _first(refusals)


def _at(
    step: Specialisation,
    model: nn.Module,
    source: ModelSource,
    clips: Sequence[VideoClip],
    encoders: Mapping[str, nn.Module],
    gradients: bool,
    reporter: Reporter,
) -> tuple[list[ExampleCall], CapturedModel, list[ShardedBlock]]:
    calls = sample.example_calls(model, source, clips, encoders, most=step.clips)
    if step.graphs is Graphs.NONE:
        return calls, blocks.whole_blocks(model, calls), []
    if step.graphs is Graphs.SHAPES:
        at = [call for call in calls if (call.clip, call.text) == (calls[0].clip, calls[0].text)]
        captured = blocks.capture_blocks(model, calls, at=at, gradients=gradients, reporter=reporter)
    else:
        captured = blocks.capture_blocks(model, calls, gradients=gradients, reporter=reporter)
    return calls, captured, [shard_block(block) for block in captured.blocks]  # what no rank could run is refused here


def _demand_clips_apart(
    step: Specialisation,
    model: nn.Module,
    source: ModelSource,
    calls: Sequence[ExampleCall],
    clips: Sequence[VideoClip],
    encoders: Mapping[str, nn.Module],
) -> tuple[str, ...]:
    """What a run should know where it could not be told whether a batch computes what its clips do."""
    if step.clips is not None:
        return ()
    call = min(calls, key=lambda call: (math.prod(call.clip), call.text))
    frames, height, width = call.clip
    like = clips[0] if clips else VideoClip(0, frames, height, width, call.text)
    reason = demand_clips_apart(model, source, call, like, encoders)
    return () if reason is None else (f"not compared whether two clips in a batch are what they are alone: {reason}",)


def _first(refusals: Sequence[UserError]) -> UserError:
    """The blocks' own reason: another number of clips got round the other."""
    return next((refusal for refusal in refusals if not clips_mixed(refusal)), refusals[0])


def recorded_model(
    model: nn.Module, source: ModelSource, clips: Sequence[VideoClip], encoders: Mapping[str, nn.Module]
) -> CapturedModel:
    """The calls of a model's blocks without their graphs. Raises ``UserError`` for a model that cannot be run."""
    try:
        return blocks.whole_blocks(model, sample.example_calls(model, source, clips, encoders))
    except UserError as refusal:
        if cannot_on_meta(refusal) or _final(refusal):
            raise
        return blocks.whole_blocks(model, sample.example_calls(model, source, clips, encoders, most=1))


def captured_again(
    step: Specialisation, model: nn.Module, source: ModelSource, clips: Sequence[VideoClip]
) -> CapturedModel:
    """What ``specialise`` captured at this step, not verified again; of a graph for each shape none yet."""
    calls = sample.example_calls(model, source, clips, most=step.clips)
    if step.graphs is Graphs.ONE:
        return blocks.capture_blocks(model, calls, verify=False)
    return blocks.whole_blocks(model, calls)


def captured_at(
    step: Specialisation, clip: VideoClip, model: nn.Module, source: ModelSource, clips: Sequence[VideoClip]
) -> CapturedModel:
    """The graphs of clips shaped like ``clip``. Raises ``UserError`` where this shape has none."""
    calls = sample.example_calls(model, source, clips, most=step.clips)
    at = sample.calls_of_shape(model, source, clip, most=step.clips)
    return blocks.capture_blocks(model, calls, at=at, verify=False)


def _cannot_run(refusal: UserError) -> bool:
    return all(isinstance(diagnostic, CannotRecord) for diagnostic in refusal.diagnostics)


def _final(refusal: UserError) -> bool:
    return not all(isinstance(diagnostic, STEPS_DOWN) for diagnostic in refusal.diagnostics)
