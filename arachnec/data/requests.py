"""Requests: the videos to generate. In: a JSONL, CSV or Parquet file. Out: one request a row, in the file's order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from arachnec.data.clip import VideoClip, caption_tokens
from arachnec.data.columns import NAMES, RowKeys
from arachnec.data.manifest import (
    bad_value,
    identifier,
    integer,
    missing_key_error,
    same_id_error,
    text,
    tokens_of_text,
)
from arachnec.data.rows import Row, read_rows
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.limits import LONGEST_ID

if TYPE_CHECKING:
    from torch import Tensor

STEPS, GUIDANCE = 50, 1.0  # of a row that does not say
REQUEST = "request"  # what a row stands for, in messages
NAMES_FILES = "a request's files are named by its id"
REQUEST_KEYS = RowKeys(
    keys=(
        *("id", "caption", "negative_prompt", "text_tokens", "frames", "height", "width"),
        *("steps", "guidance", "seed", "arrival"),
    ),
    names={
        "caption": ("caption", "text", "prompt"),
        "frames": NAMES["frames"],
        "steps": ("steps", "num_inference_steps"),
        "guidance": ("guidance", "guidance_scale"),
    },
    texts=("caption", "negative_prompt"),
    fractions=("guidance", "arrival"),
)


@dataclass(frozen=True)
class Request:
    """One video to generate.

    ``frames``, ``height`` and ``width`` are pixels. ``guidance`` is the scale of classifier-free guidance; up to 1
    there is none. ``seed`` seeds the generator of its noise. ``arrival`` is in seconds from the start: no step of the
    request runs before. ``text_tokens`` is the caption's length. ``encoded`` and ``negative_encoded`` map an encoder's
    name to its output ``[1, ...]`` for the caption and for the negative prompt; empty without encoders.
    """

    id: str | int
    caption: str | None
    frames: int
    height: int
    width: int
    steps: int = STEPS
    guidance: float = GUIDANCE
    seed: int = 0
    arrival: float = 0.0
    text_tokens: int = 0
    negative_prompt: str | None = None
    encoded: Mapping[str, Tensor] = field(default_factory=dict, compare=False)
    negative_encoded: Mapping[str, Tensor] = field(default_factory=dict, compare=False)

    def clip(self, conditional: bool = True) -> VideoClip:
        """The clip that a model sees: of the caption, or of the negative prompt, which is empty where there is none."""
        if conditional:
            tokens, caption, encoded = self.text_tokens, self.caption, self.encoded
        else:
            caption = self.negative_prompt or ""
            tokens, encoded = caption_tokens(caption), self.negative_encoded
        return VideoClip(self.id, self.frames, self.height, self.width, tokens, caption, encoded=encoded)

    @property
    def name(self) -> str:
        """The request for people."""
        return str(self.id)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """What equal requests share in a forward: frames, height, width, text tokens."""
        return self.frames, self.height, self.width, self.text_tokens


def read_requests(path: str | Path) -> tuple[Request, ...]:
    """Read a file of requests; ``docs/sampling.md`` describes its keys. Raises ``UserError`` with file and line.

    A row without ``id`` or ``seed`` has its number, counted from 0.
    """
    path = Path(path)
    requests: dict[str, Request] = {}
    rows: dict[str, int] = {}
    for row in read_rows(path, REQUEST_KEYS):
        request = _request(row)
        name = str(request.id)
        if name in requests:
            raise same_id_error(row.span("id"), REQUEST, request.id, rows[name] + 1, NAMES_FILES)
        requests[name], rows[name] = request, row.number
    if not requests:
        raise user_error(
            f"`{path}` lists no requests",
            help='add a line such as {"caption": "a fox", "frames": 81, "height": 480, "width": 832}',
        )
    return tuple(requests.values())


def _request(row: Row) -> Request:
    for key in ("frames", "height", "width"):
        if key not in row.values:
            raise missing_key_error(row.span(), REQUEST, key, f"add `{key}`, in pixels of the video to generate")
    frames, height, width = (integer(row, key) or 0 for key in ("frames", "height", "width"))
    caption = text(row, "caption")
    seed, steps = integer(row, "seed"), integer(row, "steps")
    return Request(
        id=_id(row),
        caption=caption,
        frames=frames,
        height=height,
        width=width,
        steps=STEPS if steps is None else steps,
        guidance=_number(row, "guidance", GUIDANCE),
        seed=row.number if seed is None else seed,
        arrival=_number(row, "arrival", 0.0),
        text_tokens=tokens_of_text(row, REQUEST, () if caption is None else (caption,)),
        negative_prompt=text(row, "negative_prompt"),
    )


def _id(row: Row) -> str | int:
    value = identifier(row)
    if not _names_a_file(str(value)):
        remedy = f"use letters, digits, `-`, `_` and `.`, {LONGEST_ID} bytes at most"
        raise UserError(bad_value(row, "id", "a name for files", remedy))
    return value


def _names_a_file(value: str) -> bool:
    return (
        len(value.encode()) <= LONGEST_ID
        and value.isprintable()
        and not set(value) & set('/\\:*?"<>|')
        and value.strip(". ") != ""
    )


def _number(row: Row, key: str, default: float) -> float:
    value = row.values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UserError(bad_value(row, key, "a number of at least 0", f"write `{key}` as a number"))
    if not (math.isfinite(value) and 0 <= value <= 1e9):
        raise UserError(bad_value(row, key, "a number of at least 0", f"correct `{key}`"))
    return float(value)
