"""Clip shapes for which compiling had no time: the model is run at them beside training, shapes only.

In: an executable and its untried shapes. Out: nothing, or the mistake that names the clip. A shape is tried before its
first step is planned, and earlier where the background planner has nothing else to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from arachnec.backends.cascade_step import in_training_precision
from arachnec.data.clip import VideoClip
from arachnec.executable.folder import Executable
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Clip
from arachnec.tracing.clip_trials import run_clip
from arachnec.tracing.find import find_blocks
from arachnec.tracing.record import Repeats
from arachnec.tracing.sample import ModelSource, meta_encoders

Shape = tuple[int, int, int, int]


@dataclass
class ShapeTrials:
    """``left`` are the shapes that are still to be tried; ``listed`` those of them that a clip is known of, the early
    ones first."""

    executable: Executable
    left: set[Shape]
    listed: dict[Shape, VideoClip]
    _refusal: UserError | None = None

    @classmethod
    def of(cls, executable: Executable) -> ShapeTrials:
        left = set(executable.header.untried)
        first = {clip.shape: clip for clip in reversed(executable.clips) if clip.shape in left}
        return cls(executable, left, dict(reversed(first.items())))

    @property
    def unfinished(self) -> bool:
        """Whether ``try_next`` has something to try."""
        return bool(self.listed) and self._refusal is None

    def try_next(self) -> None:
        """Try one more shape that is listed. What the model refuses, ``try_clips`` raises."""
        try:
            self._try(next(iter(self.listed.values())))
        except UserError as refusal:
            self._refusal = refusal

    def try_clips(self, clips: Iterable[tuple[str, Shape]]) -> None:
        """Try the shapes of some clips, by name, that are left. Raises ``UserError`` for one that the model refuses,
        and for one that it was found to refuse."""
        if self._refusal is not None:
            raise self._refusal
        for name, shape in clips:
            if shape in self.left:
                caption = "a" * max(1, shape[3] - 1)
                self._try(self._clips.get((name, shape)) or VideoClip(name, *shape, caption))

    def _try(self, clip: VideoClip) -> None:
        run_clip(self._model, self._source, self._encoders, clip, self._repeats)
        self.left.remove(clip.shape)
        self.listed.pop(clip.shape, None)

    @cached_property
    def _clips(self) -> dict[tuple[str, Shape], VideoClip]:
        return {(clip.name, clip.shape): clip for clip in self.executable.clips}

    @cached_property
    def _source(self) -> ModelSource:
        return in_training_precision(self.executable.model_file(), self.executable.training)

    @cached_property
    def _repeats(self) -> Repeats:
        return Repeats(self._model, find_blocks(self._model))

    @cached_property
    def _model(self) -> nn.Module:
        with torch.device("meta"):
            return self._source.build()

    @cached_property
    def _encoders(self) -> dict[str, nn.Module]:
        return meta_encoders(self._source)


def any_untried(executable: Executable, clips: Iterable[Clip]) -> bool:
    """Whether the first step of these clips has to wait until their shapes were tried."""
    untried = set(executable.header.untried)
    return any((clip.frames, clip.height, clip.width, clip.text) in untried for clip in clips)
