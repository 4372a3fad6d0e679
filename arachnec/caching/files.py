"""Where the output of an encoder for a clip lies, which are there, and which were made by several ranks.

A file is named by everything that its content follows from: the encoders' code and weights, the video and its time, the
clip's sizes and caption. So what is there is right, whatever run wrote it, and equal clips share one file. A file is
renamed to its name once it is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
from torch import Tensor

from arachnec.checkpoint.files import save_tensors, synced
from arachnec.cost.compute import is_divided
from arachnec.data.clip import VideoClip
from arachnec.data.encoded_file import TENSOR, is_whole
from arachnec.ir.diagnostic import counted
from arachnec.ir.nodes import Module
from arachnec.models.file import ModelFile
from arachnec.models.initial_weights import encoder_folder
from arachnec.models.weight_files import weight_files

Row = TypeVar("Row")
PART = ".part"  # extension of a file that is being written


@dataclass(frozen=True)
class EncodedFiles:
    """The files in ``folder`` of these ``encoders``; ``identity`` stands for their code and weights."""

    folder: Path
    identity: str
    encoders: tuple[str, ...]

    def path(self, encoder: str, clip: VideoClip) -> Path:
        taken = clip.start, clip.target_fps, clip.stride
        seen = [self.identity, encoder, _stamp(clip.path), *taken, *clip.shape, clip.caption]
        digest = hashlib.blake2b(json.dumps(seen).encode(), digest_size=16).hexdigest()
        return self.folder / encoder / digest[:2] / f"{digest}.safetensors"

    def of(self, clip: VideoClip) -> dict[str, Path]:
        return {encoder: self.path(encoder, clip) for encoder in self.encoders}

    def missing(self, clips: Iterable[VideoClip]) -> list[VideoClip]:
        """The clips of which a file is not there, or cut off; of several with the same files the first."""
        wanted: dict[tuple[Path, ...], VideoClip] = {}
        for clip in clips:
            files = tuple(self.of(clip).values())
            if not all(is_whole(file) for file in files):
                wanted.setdefault(files, clip)
        return list(wanted.values())

    def write(self, encoder: str, clip: VideoClip, value: Tensor) -> None:
        """Raises OSError."""
        path = self.path(encoder, clip)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}{PART}")
        try:
            save_tensors({TENSOR: value.detach().cpu().contiguous()}, draft, {})
            synced(draft)
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove what a run that was killed left half written."""
        for encoder in self.encoders:
            for draft in (self.folder / encoder).glob(f"*/*{PART}"):
                draft.unlink(missing_ok=True)


def identity_of(model_file: ModelFile, encoders: Sequence[str], seed: int, init: Path | None) -> str:
    """What the encoders' output follows from besides the clip: the model file, its neighbours, and the weights."""
    folder = model_file.path.parent
    neighbours = [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in model_file.modules]
    weights: Mapping[str, str] = {}
    if init is not None:
        places = {name: encoder_folder(init, name) for name in encoders}
        weights = {name: weight_files(place).fingerprint() for name, place in places.items() if place.is_dir()}
    return hashlib.sha256(json.dumps([model_file.digest, neighbours, weights, seed]).encode()).hexdigest()


def _stamp(path: Path | None) -> tuple[str, int, int] | None:
    """A video by its place, size and time, as `make` knows it."""
    if path is None:
        return None
    stat = path.stat()
    return str(path.absolute()), stat.st_size, stat.st_mtime_ns


DIVIDED = "divided.jsonl"


class Divided(msgspec.Struct, frozen=True):
    """An encoder that so many ranks ran together, for so many clips of one shape."""

    encoder: str
    ranks: int
    frames: int
    height: int
    width: int
    clips: int

    def text(self) -> str:
        shape = f"{self.frames}x{self.height}x{self.width}"
        return f"{self.encoder} was divided over {self.ranks} ranks for {counted(self.clips, 'clip')} of {shape}"


def divided_in(module: Module, clips: Mapping[int, VideoClip]) -> list[Divided]:
    """What a batch's program divides."""
    stages = {stage.name: stage for stage in module.stages}
    ranks_of = {
        step.target: len(step.peers) for program in module.programs for step in program.instructions if step.peers
    }
    rows = [
        Divided(cascade.stage, ranks, clip.frames, clip.height, clip.width, 1)
        for cascade in module.cascades
        if (ranks := ranks_of.get(cascade.name, 1)) > 1 and is_divided(cascade, stages[cascade.stage], ranks)
        for clip in (clips[number] for number in cascade.clips)
    ]
    return together(rows)


def together(rows: Iterable[Divided]) -> list[Divided]:
    """One row for each encoder, number of ranks and shape, in the order in which they came."""
    counts: Counter[Divided] = Counter()
    for row in rows:
        counts[msgspec.structs.replace(row, clips=0)] += row.clips
    return [msgspec.structs.replace(row, clips=count) for row, count in counts.items()]


def add_rows(file: Path, rows: Iterable[msgspec.Struct]) -> None:
    """Add what a batch told to what is known beside the plan."""
    with file.open("ab") as stream:
        stream.writelines(msgspec.json.encode(row) + b"\n" for row in rows)


def read_rows(file: Path, kind: type[Row]) -> list[Row]:
    """What all batches told."""
    lines = file.read_bytes().splitlines() if file.is_file() else []
    return [msgspec.json.decode(line, type=kind) for line in lines]
