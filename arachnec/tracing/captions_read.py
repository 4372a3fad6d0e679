"""Whether captions that are dropped in training are still read then: not by an encoder that ran beforehand."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from arachnec.data.clip import VideoClip
from arachnec.data.encoded_file import encoded_beforehand
from arachnec.ir.diagnostic import user_error


def require_one_caption(clips: Sequence[VideoClip], encoders: Mapping[str, nn.Module]) -> None:
    """Raises ``UserError`` where an encoder that reads captions runs beforehand, and a clip has several."""
    several = next((clip for clip in clips if clip.captions), None)
    for name, encoder in encoders.items() if several is not None else ():
        if several is not None and _reads_captions(encoder, several):
            raise user_error(
                f"clip `{several.name}` has several captions, of which every step draws one, and `{name}` reads one "
                "beforehand",
                help=(
                    "leave that encoder to the training, with `arachnec cache --encoders` and the names of the "
                    "others, or give one caption"
                ),
            )


def demand_captions_read(dropout: float, clips: Sequence[VideoClip], encoders: Mapping[str, nn.Module]) -> None:
    """Raises ``UserError`` where captions are dropped behind an encoder that has read them.

    Of an encoder that the model file does not have, only ``vae`` is taken to read none.
    """
    for name in sorted(encoded_beforehand(clips)) if dropout else ():
        encoder = encoders.get(name)
        if name != "vae" if encoder is None else _reads_captions(encoder, clips[0]):
            raise user_error(
                f"`caption_dropout` drops captions, and `{name}` has encoded them beforehand",
                help=(
                    "leave that encoder to the training, with `arachnec cache --encoders` and the names of the "
                    "others, or drop none"
                ),
            )


def _reads_captions(encoder: nn.Module, clip: VideoClip) -> bool:
    noted = _Noted(replace(clip, path=None, caption=clip.caption or ""))
    with contextlib.suppress(Exception):  # a video that is not there
        encoder.load(noted, "cpu")  # type: ignore[operator]
    return noted.read


class _Noted:
    """A clip that knows whether its caption was asked for."""

    def __init__(self, clip: VideoClip) -> None:
        self.read = False
        self._clip = clip

    def __getattr__(self, name: str) -> Any:
        self.read |= name == "caption"
        return getattr(self._clip, name)
