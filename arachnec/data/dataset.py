"""Somebody's dataset: an item as a clip, what it raises told at its own line, its state as text and back."""

from __future__ import annotations

import base64
import json
import re
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from arachnec.data.clip import VideoClip
from arachnec.data.columns import CLIP_KEYS
from arachnec.data.manifest import clips_of_row
from arachnec.data.rows import Row as ManifestRow
from arachnec.data.rows import normalised
from arachnec.ir.diagnostic import Diagnostic, UserError, counted, user_error
from arachnec.ir.limits import LONGEST_EXCEPTION
from arachnec.ir.nodes import Span
from arachnec.ir.users_code import is_users, line_of, users_line

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


# torch's loader raises a worker's exception again, with the worker's traceback as its text
OF_A_WORKER = "Original Traceback (most recent call last):"
FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in ', re.MULTILINE)


@dataclass(frozen=True)
class DatasetRaised(Diagnostic):
    title = "the dataset raised {exception} after {drawn}"
    label = "raised here"
    help = "{remedy}"
    exception: str
    drawn: str
    remedy: str


def dataset_raised(error: BaseException, clips: int) -> DatasetRaised:
    """What to say of an ``error`` after so many clips."""
    text = str(error)
    if OF_A_WORKER in text:
        trace = text.partition(OF_A_WORKER)[2]
        named = trace.strip().splitlines()[-1]
        frames = [(match["file"], int(match["line"])) for match in FRAME.finditer(trace)]
        span = _last_of_the_users(frames)
    else:
        message = " ".join(text.split())
        named = f"{type(error).__name__}{': ' if message else ''}{message}"
        frames = [(frame.filename, frame.lineno or 1) for frame in traceback.extract_tb(error.__traceback__)]
        span = users_line(error)
    from_shards = any("webdataset" in Path(file).parts for file, _ in frames)
    return DatasetRaised(span, named[:LONGEST_EXCEPTION], counted(clips, "clip"), _what_to_do(named, from_shards))


def _what_to_do(named: str, from_shards: bool) -> str:
    if "nodesplitter" in named:  # of WebDataset, where torchrun has set a number of ranks
        return "only rank 0 draws, for all ranks: give WebDataset nodesplitter=None"
    short = "unexpected end of data" in named or "ReadError" in named or "EOFError" in named
    if from_shards and named.startswith("KeyError"):
        return "no file of the item has this name, or its shard is cut short: look with `tar tf FILE`"
    return (
        "the file is cut short or damaged: check it with `tar tf FILE`, and copy or write it again"
        if short
        else "correct the dataset; what was trained so far is in the checkpoint, where one is kept"
    )


def _last_of_the_users(frames: Iterable[tuple[str, int]]) -> Span | None:
    own = [frame for frame in frames if is_users(frame[0])]
    return line_of(*own[-1]) if own else None


TAG = "__kind__"


def to_text(state: object) -> str:
    """As JSON. Raises ``UserError`` for an object of another kind, with its place."""
    return json.dumps(_encoded(state, "state"))


def from_text(text: str) -> Any:
    """The state that ``to_text`` was given."""
    return _decoded(json.loads(text))


def _encoded(value: Any, place: str) -> Any:
    import torch

    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {TAG: "bytes", "data": base64.b64encode(value).decode()}
    if isinstance(value, torch.Tensor):
        own = value.detach().cpu().contiguous()
        data = base64.b64encode(own.reshape(-1).view(torch.uint8).numpy().tobytes()).decode()
        return {TAG: str(own.dtype).removeprefix("torch."), "shape": list(own.shape), "data": data}
    if isinstance(value, list | tuple):
        rows = [_encoded(item, f"{place}[{number}]") for number, item in enumerate(value)]
        return rows if isinstance(value, list) else {TAG: "tuple", "rows": rows}
    if isinstance(value, Mapping):
        pairs = [[_encoded(key, place), _encoded(item, f"{place}[{key!r}]")] for key, item in value.items()]
        return {TAG: "dict", "rows": pairs}
    raise user_error(
        f"the dataset's state_dict() has a {type(value).__name__} at `{place}`, which no checkpoint holds",
        help="return numbers, text, bytes, lists, dicts and tensors",
    )


def _decoded(value: Any) -> Any:
    import torch

    if isinstance(value, list):
        return [_decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value[TAG]
    if kind == "dict":
        return {_decoded(key): _decoded(item) for key, item in value["rows"]}
    if kind == "tuple":
        return tuple(_decoded(item) for item in value["rows"])
    data = base64.b64decode(value["data"])
    if kind == "bytes":
        return data
    flat = torch.frombuffer(bytearray(data), dtype=getattr(torch, kind)) if data else torch.empty(0)
    return flat.view(value["shape"])
