"""What a frozen encoder made of a clip, in a file: one tensor, ``encoded``, as the encoder gave it (``[1, ...]``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import Diagnostic, UserError

if TYPE_CHECKING:
    from torch import Tensor

TENSOR = "encoded"


@dataclass(frozen=True)
class UnreadableEncoded(Diagnostic):
    title = "what `{encoder}` made of clip `{clip}` cannot be read from {path}: {reason}"
    help = (
        "run `arachnec cache` again: it encodes what is missing or cut off. Remove a file that is damaged otherwise"
    )
    encoder: str
    clip: str | int
    path: str
    reason: str


@dataclass(frozen=True)
class PartlyEncoded(Diagnostic):
    title = "clip `{clip}` has {found} encoded beforehand, and clip `{other}` {before}"
    help = "an encoder runs for all clips or for none: give manifests that `arachnec cache` wrote alike"
    clip: str | int
    found: str
    other: str | int
    before: str


def read_encoded(clip: VideoClip) -> dict[str, Tensor]:
    """The output ``[1, ...]`` of every encoder that ran beforehand, by its name. Raises ``UserError``."""
    if not clip.cached:
        return {}
    from safetensors import SafetensorError, safe_open

    values: dict[str, Tensor] = {}
    for name, path in clip.cached.items():
        try:
            with safe_open(path, framework="pt") as file:
                values[name] = file.get_tensor(TENSOR)
        except (SafetensorError, OSError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise UserError(UnreadableEncoded(None, name, clip.name, str(path), reason)) from None
    return values


def encoded_like(clip: VideoClip, encoder: str) -> Tensor | None:
    """A meta tensor like what a clip's file holds; None where there is no file, or none that can be read."""
    if encoder not in clip.cached:
        return None
    import torch
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(clip.cached[encoder], framework="pt") as file:
            rows = file.get_slice(TENSOR)
            if not rows.get_shape():
                return None
            return torch.empty(rows.get_shape(), dtype=rows[:0].dtype, device="meta")
    except (SafetensorError, OSError):
        return None


def is_whole(path: Path) -> bool:
    """Whether a file is there as long as its header says. Its values are not read."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return TENSOR in file.keys()  # noqa: SIM118
    except (SafetensorError, OSError):
        return False


def encoded_beforehand(clips: Sequence[VideoClip]) -> frozenset[str]:
    """The encoders whose output all of the clips have in files. Raises ``UserError`` where clips differ in it."""
    first = clips[0] if clips else None
    for clip in clips:
        assert first is not None
        if clip.cached.keys() != first.cached.keys():
            raise UserError(PartlyEncoded(None, clip.name, _named(clip), first.name, _named(first)))
    return frozenset(first.cached if first else ())


def _named(clip: VideoClip) -> str:
    return ", ".join(f"`{name}`" for name in clip.cached) or "nothing"
