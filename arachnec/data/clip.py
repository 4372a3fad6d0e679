"""The clip as a user's ``sample`` sees it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from torch import Tensor


class Timesteps(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """t on (0, 1), 1 all noise: ``uniform``, or ``logit-normal``, the sigmoid of a normal one with ``mean``, ``std``.

    t is then shifted to s t / (1 + (s - 1) t). s is ``shift``, times sqrt(tokens / ``base_tokens``) where that is
    given, so that larger clips see more noise. Only those from ``min`` to ``max`` are drawn, each as often beside the
    others as without; where both are None the model's own bounds hold. Esser et al.,
    arXiv 2403.03206, section 3.1 and equation 23.
    """

    sampling: Literal["uniform", "logit-normal"] = "uniform"
    mean: float = 0.0
    std: float = 1.0
    shift: float = 1.0
    base_tokens: int | None = None
    min: float | None = None
    max: float | None = None

    @property
    def levels(self) -> tuple[float, float] | None:
        """From which noise level to which, where that is said."""
        if self.min is None and self.max is None:
            return None
        return self.min or 0.0, 1.0 if self.max is None else self.max

    def factor(self, tokens: int) -> float:
        """s, of a clip of so many tokens."""
        return self.shift * (math.sqrt(tokens / self.base_tokens) if self.base_tokens else 1.0)


UNIFORM = Timesteps()


@dataclass(frozen=True)
class VideoClip:
    """One training video.

    ``frames``, ``height`` and ``width`` are pixels of the training clip, not of the file: a file is scaled and cropped
    to them from its frame ``start`` on. ``text_tokens`` is the caption's length in tokens. ``path`` is a video, or a
    ``.safetensors`` file of precomputed latents, or None for a clip that only has a size. ``encoded`` maps an encoder's
    name to its output for this clip, ``[1, ...]``; it is empty where the model file has no encoders. ``cached`` are the
    files of such outputs, of encoders that ran beforehand. ``values`` are the tensors that a dataset gave with it, by
    its own names, and what columns of its manifest say that are no keys: files as paths, and numbers and texts. ``fps``
    is the file's own frame rate, None where nothing says it; of the file's frames those shown at ``target_fps`` times a
    second are taken, or every ``stride``-th.
    ``timesteps`` says how ``sample`` is to draw the noise level; in a step that drops the caption it is empty.
    ``title`` is what people read where the file's stem would not be unique. ``captions`` are several of which every
    step draws one. ``counted``: its ``text_tokens`` are those of its longest caption, which nobody else counted.
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
    values: Mapping[str, Any] = field(default_factory=dict, compare=False)
    timesteps: Timesteps = field(default=UNIFORM, compare=False)
    title: str = field(default="", compare=False)
    captions: tuple[str, ...] = ()
    counted: bool = field(default=False, compare=False)
    fps: float | None = None
    target_fps: float | None = None
    stride: int = 1

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """What equal clips share: frames, height, width, text tokens."""
        return self.frames, self.height, self.width, self.text_tokens

    @property
    def texts(self) -> tuple[str, ...]:
        """Every caption that a step may have."""
        return self.captions or (() if self.caption is None else (self.caption,))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those of the ``values`` that a dataset gave as tensors."""
        return {name: value for name, value in self.values.items() if hasattr(value, "dtype")}

    @property
    def name(self) -> str:
        """The clip for people: its file's stem, else its id."""
        return self.title or _stem(self)

    @property
    def frame_rate(self) -> float | None:
        """Frames a second of the training clip; None where nothing says it."""
        return self.target_fps or (self.fps and self.fps / self.stride)


def caption_tokens(caption: str) -> int:
    """Tokens of a caption as ByT5 counts them (arXiv 2105.13626): its UTF-8 bytes and the end of the sequence."""
    return len(caption.encode()) + 1


def with_unique_names(clips: Sequence[VideoClip]) -> list[VideoClip]:
    """The clips, each with a ``name`` of its own: of equal stems the folder is added, else the id."""
    names = [_stem(clip) for clip in clips]
    for longer in (_folder_and_stem, _stem_and_id):
        counts = Counter(names)
        names = [name if counts[name] == 1 else longer(clip) for name, clip in zip(names, clips, strict=True)]
    return [clip if clip.name == name else replace(clip, title=name) for name, clip in zip(names, clips, strict=True)]


def _stem(clip: VideoClip) -> str:
    return str(clip.id) if clip.path is None else _printable(clip.path.stem)


def _folder_and_stem(clip: VideoClip) -> str:
    return str(clip.id) if clip.path is None else _printable(f"{clip.path.parent.name}/{clip.path.stem}")


def _stem_and_id(clip: VideoClip) -> str:
    return str(clip.id) if clip.path is None else f"{_printable(clip.path.stem)}#{clip.id}"


def _printable(name: str) -> str:
    """A file's name as UTF-8, which it need not be."""
    return name.encode("utf-8", "replace").decode()
