"""The clip as a user's ``sample`` sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from arachnec.data.timesteps import UNIFORM, Timesteps

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class VideoClip:
    """One training video.

    ``frames``, ``height`` and ``width`` are pixels of the training clip, not of the file: a file is scaled and cropped
    to them from its frame ``start`` on. ``text_tokens`` is the caption's length in tokens. ``path`` is a video, or a
    ``.safetensors`` file of precomputed latents, or None for a clip that only has a size. ``encoded`` maps an encoder's
    name to its output for this clip, ``[1, ...]``; it is empty where the model file has no encoders. ``cached`` are the
    files of such outputs, of encoders that ran beforehand. ``values`` are the tensors that a dataset gave with it, by
    its own names; empty for a clip that only has a size. ``fps`` is the file's own frame rate, None where nothing says
    it; of the file's frames those shown at ``target_fps`` times a second are taken, or every ``stride``-th.
    ``timesteps`` says how ``sample`` is to draw the noise level; in a step that drops the caption it is empty.
    """

    id: str | int
    frames: int
    height: int
    width: int
    text_tokens: int
    caption: str | None = None
    path: Path | None = None
    start: int = 0
    encoded: Mapping[str, Tensor] = field(default_factory=dict, compare=False)
    cached: Mapping[str, Path] = field(default_factory=dict, compare=False)
    values: Mapping[str, Tensor] = field(default_factory=dict, compare=False)
    timesteps: Timesteps = field(default=UNIFORM, compare=False)
    fps: float | None = None
    target_fps: float | None = None
    stride: int = 1

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """What equal clips share: frames, height, width, text tokens."""
        return self.frames, self.height, self.width, self.text_tokens

    @property
    def frame_rate(self) -> float | None:
        """Frames a second of the training clip; None where nothing says it."""
        return self.target_fps or (self.fps and self.fps / self.stride)


def caption_tokens(caption: str) -> int:
    """Tokens of a caption as ByT5 counts them (arXiv 2105.13626): its UTF-8 bytes and the end of the sequence."""
    return len(caption.encode()) + 1
