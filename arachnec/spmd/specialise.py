"""The least special capture of a model: what a block's graphs serve, every call or some, and what gave them.

The steps are tried in order; the last refusal is the first one, which names the blocks' own reason. ``docs/models.md``
explains the steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from torch import nn

from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import UserError
from arachnec.ir.long_computations import Reporter, unreported
from arachnec.ir.nodes import Stage
from arachnec.ir.values import Value
from arachnec.spmd.rewrite import ShardedBlock, gather_warnings, shard_block
from arachnec.tracing import blocks, sample
from arachnec.tracing.blocks import CapturedModel
from arachnec.tracing.clip_trials import ClipsMixed, demand_clips_apart
from arachnec.tracing.errors import CannotRecord, NotCaptured, cannot_on_meta
from arachnec.tracing.record import ExampleCall
from arachnec.tracing.sample import ModelSource


class Graphs(StrEnum):
    """How many graphs a block structure has."""

    ONE = "one"
    SHAPES = "shapes"  # one for every clip shape
    NONE = "none"  # blocks run as they are written, whole


@dataclass(frozen=True)
class Specialisation:
    """``clips``: how many a forward may take at most; None: any number."""

    graphs: Graphs = Graphs.ONE
    clips: int | None = None

    @property
    def attributes(self) -> dict[str, Value | None]:
        """Of the trained stage, for the planner and for the ranks; nothing where one graph serves all calls."""
        return {
            "graphs": None if self.graphs is Graphs.ONE else str(self.graphs),
            "most_clips": self.clips,
            "degrees": (1,) if self.graphs is Graphs.NONE else None,
        }

    @staticmethod
    def of(stage: Stage) -> Specialisation:
        """As a stage says."""
        clips = stage.attrs.get("most_clips")
        return Specialisation(
            Graphs(str(stage.attrs.get("graphs", Graphs.ONE))), clips if isinstance(clips, int) else None
        )


# From what costs nothing to what costs most.
STEPS = (
    Specialisation(),
    Specialisation(clips=1),
    Specialisation(Graphs.SHAPES),
    Specialisation(Graphs.SHAPES, clips=1),
    Specialisation(Graphs.NONE),
    Specialisation(Graphs.NONE, clips=1),
)

# What another step may get round. Random numbers, dropout and state are wrong at every step.
STEPS_DOWN = (NotCaptured, CannotRecord, ClipsMixed)


def costs(step: Specialisation, refusals: Sequence[UserError], seconds: float) -> tuple[str, ...]:
    """A line for each thing that a step takes away, with the reason; ``seconds`` are those of one shape's graphs."""
    lines = []
    captures = [refusal for refusal in refusals if not clips_mixed(refusal)]
    if step.graphs is Graphs.SHAPES:
        lines.append(
            f"no graph of the blocks serves all clip shapes ({_reason(captures)}): every rank captures them again for "
            f"each shape that it shares, {seconds:.1f} s before its first use"
        )
    if step.graphs is Graphs.NONE:
        lines.append(
            f"the blocks run whole on one rank ({_reason(captures)}): degree 1 only, so a clip must fit one device and "
            "the longest clip bounds the step"
        )
    if step.clips == 1:
        mixed = [refusal for refusal in refusals if clips_mixed(refusal)]
        lines.append(
            f"a forward takes one clip ({_reason(mixed or refusals[:1])}): equal short clips are not batched, "
            "each pays its own launches and its own gathers"
        )
    return tuple(lines)


def clips_mixed(refusal: UserError) -> bool:
    """Whether a model was refused because several clips in a batch do not run, or are not what they are alone."""
    return any(isinstance(diagnostic, (ClipsMixed, CannotRecord)) for diagnostic in refusal.diagnostics)


def _reason(refusals: Sequence[UserError]) -> str:
    return "; ".join(dict.fromkeys(map(str, refusals)))


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
            if step.clips == 1 and all(isinstance(refused, CannotRecord) for refused in refusal.diagnostics):
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


def _final(refusal: UserError) -> bool:
    return not all(isinstance(diagnostic, STEPS_DOWN) for diagnostic in refusal.diagnostics)
