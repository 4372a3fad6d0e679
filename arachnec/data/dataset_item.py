"""One item of a dataset as a clip: a ``VideoClip``, or a mapping with the keys of a manifest and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from arachnec.data.clip import VideoClip
from arachnec.data.columns import CLIP_KEYS
from arachnec.data.manifest import clips_of_row
from arachnec.data.rows import Row as ManifestRow
from arachnec.data.rows import normalised
from arachnec.ir.diagnostic import UserError, user_error

VIDEO = "video"  # pixels: channels x frames x height x width
SIZES = ("frames", "height", "width")
ITEM_KEYS = replace(CLIP_KEYS, extras=False)  # more is given as tensors


def bad_item_error(number: int, found: str, remedy: str) -> UserError:
    return user_error(f"item {number} of the dataset is {found}", help=remedy)


def other_shape_error(clip: str | int, announced: str, found: str) -> UserError:
    return user_error(
        f"clip `{clip}` announces {announced} and its `video` is {found}",
        help="`video` is channels x frames x height x width; frames, height and width may be left out then",
    )


def clip_of_item(item: object, number: int) -> VideoClip:
    """The clip that item ``number`` of a dataset is.

    A mapping has a manifest's keys; what it has besides must be tensors or arrays, and becomes the clip's ``values``.
    ``__key__``, as WebDataset gives it, is an ``id``. Sizes that are left out are those of ``video``. Raises
    ``UserError`` for what is missing, unknown, or of another shape than announced.
    """
    if isinstance(item, VideoClip):
        return _as_announced(item)
    if not isinstance(item, Mapping):
        remedy = "a clip is an arachnec.VideoClip, or a dict with frames, height, width, caption or text_tokens"
        raise bad_item_error(number, f"a {type(item).__name__}", remedy)
    values = {str(key): _tensor(value, str(key), number) for key, value in item.items() if _is_array(value)}
    given = {str(key): value for key, value in item.items() if not _is_array(value)}
    key = given.pop("__key__", None)
    if key is not None:
        given.setdefault("id", str(key))
    given = {name: value for name, value in given.items() if not name.startswith("__")}
    for name, value in given.items():
        instead = _remedy(name, value)
        if instead is not None:
            raise bad_item_error(number, f"a dict whose `{name}` is {_kind(value)}", instead)
    for name, text in (("txt", "caption"),):
        if name in given:
            given[text] = given.pop(name)
    video = values.get(VIDEO)
    if video is not None and video.ndim == 4:
        given |= {name: given.get(name, int(size)) for name, size in zip(SIZES, video.shape[1:], strict=True)}
    row = normalised(ManifestRow(number, _plain(given), Path("dataset"), number + 1, ""), ITEM_KEYS)
    clip = next(iter(clips_of_row(row)))
    return _as_announced(replace(clip, values={**clip.values, **values}))


def _as_announced(clip: VideoClip) -> VideoClip:
    video = clip.values.get(VIDEO)
    if video is not None and tuple(video.shape[1:]) != clip.shape[:3]:
        sizes = (" x ".join(map(str, shape)) for shape in (clip.shape[:3], tuple(video.shape)))
        raise other_shape_error(clip.id, *sizes)
    return clip


def _plain(given: Mapping[str, Any]) -> dict[str, Any]:
    """Paths as text, and numbers of numpy as numbers, as a manifest has them."""
    return {
        name: str(value) if isinstance(value, Path) else value.item() if _is_number(value) else value
        for name, value in given.items()
    }


def _is_array(value: object) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape") and bool(getattr(value, "ndim", 0))


def _is_number(value: object) -> bool:
    return hasattr(value, "dtype") and not getattr(value, "ndim", 1)


def _remedy(name: str, value: object) -> str | None:
    """What to do about a value that no row of a manifest can have; None where a row may have it."""
    known = ITEM_KEYS.place(name) is not None or name == "txt"
    if isinstance(value, bytes):
        return (
            "decode it in the dataset, to text" if known else "decode it in the dataset, to a tensor; or leave it out"
        )
    if isinstance(value, Mapping) and not known:
        return f'make its keys those of the item, {{**item.pop("{name}"), **item}}; or leave it out'
    if isinstance(value, list | tuple | Mapping) and (not known or name == VIDEO):
        return "give a tensor or an array of numbers; or leave it out"
    return None


def _kind(value: object) -> str:
    return "bytes" if isinstance(value, bytes) else f"a {type(value).__name__}"


def _tensor(value: Any, name: str, number: int) -> Any:
    import torch

    try:
        return value.detach().cpu() if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):  # an array of objects; a tensor without values
        place = " on the meta device" if isinstance(value, torch.Tensor) and value.is_meta else ""
        kind = f"a {type(value).__name__} of {value.dtype}{place}"
        remedy = "give a tensor or an array of numbers; or leave it out"
        raise bad_item_error(number, f"a dict whose `{name}` is {kind}", remedy) from None
