"""What a frozen encoder made of a clip, in a file: one tensor, ``encoded``, as the encoder gave it (``[1, ...]``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import user_error

if TYPE_CHECKING:
    from torch import Tensor

TENSOR = "encoded"


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
            raise user_error(
                f"what `{name}` made of clip `{clip.name}` cannot be read from {path}: {reason}",
                help=(
                    "run `arachnec cache` again: it encodes what is missing or cut off. Remove a file that is damaged "
                    "otherwise"
                ),
            ) from None
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
            raise user_error(
                f"clip `{clip.name}` has {_named(clip)} encoded beforehand, and clip `{first.name}` {_named(first)}",
                help="an encoder runs for all clips or for none: give manifests that `arachnec cache` wrote alike",
            )
    return frozenset(first.cached if first else ())


def _named(clip: VideoClip) -> str:
    return ", ".join(f"`{name}`" for name in clip.cached) or "nothing"
