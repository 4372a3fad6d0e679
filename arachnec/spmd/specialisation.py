"""What a graph of a block serves: every call, batches of one clip, clips of one shape, or nothing at all.

In: what was refused. Out: the next step down, and what it costs. ``docs/models.md`` explains the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Stage
from arachnec.ir.values import Value
from arachnec.spmd.inputs import NoShardedInput
from arachnec.tracing.clip_trials import ClipsMixed
from arachnec.tracing.errors import (
    BlocksNotCalled,
    CannotCapture,
    CannotRecord,
    GradientDiffers,
    NoBlocks,
    NoTokenDimension,
    NotPolymorphic,
    NumberMatters,
    RewritesArgument,
    UnequalCall,
)


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
STEPS_DOWN = (
    BlocksNotCalled,
    CannotCapture,
    CannotRecord,
    ClipsMixed,
    GradientDiffers,
    NoBlocks,
    NoShardedInput,
    NoTokenDimension,
    NotPolymorphic,
    NumberMatters,
    RewritesArgument,
    UnequalCall,
)


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
