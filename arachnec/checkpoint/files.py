"""The files of a checkpoint: safetensors whose tensors are runs of elements of flattened ones.

A file's metadata says, by name, where a run begins and how many elements the whole has. So every rank writes what it
holds, and a run on another number of ranks, cells or stages reads what it needs, from however many files.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from arachnec.checkpoint.parts import Part
from arachnec.ir.diagnostic import UserError, user_error

RUNS = "runs"  # key of the metadata: {name: [first, size of the whole]}


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    bytes: int
    sha256: str


def foreign_checkpoint_error(folder: str, difference: str) -> UserError:
    return user_error(
        f"the checkpoint {folder} does not fit this run: {difference}",
        help="give another --checkpoint folder, or what this checkpoint was made with",
    )


@dataclass(frozen=True)
class Run:
    """Elements [first, end) of a flattened tensor, in a file."""

    file: str
    first: int
    end: int


@dataclass(frozen=True)
class StoredRuns:
    """Where a tensor of ``size`` elements lies in the files of a checkpoint."""

    size: int
    runs: tuple[Run, ...]


def save_tensors(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
    """A safetensors file that others may read as any file of this user: the library alone would keep it private."""
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata)
    path.chmod(mode)


def write_file(path: Path, parts: Mapping[str, Part]) -> FileRecord:
    """Write the parts, have them on the disk, and say what was written. Raises OSError."""
    metadata = {name: (part.first, part.size) for name, part in parts.items()}
    values = {name: part.values for name, part in parts.items()}
    save_tensors(values, path, {RUNS: msgspec.json.encode(metadata).decode()})
    synced(path)
    return FileRecord(path.name, path.stat().st_size, sha256(path))


def synced(path: Path) -> None:
    """Returns once the system has a file, or the names in a folder, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@torch.no_grad()
def fill(folder: Path, files: Sequence[str], wanted: Mapping[str, Part]) -> None:
    """Read every wanted part from the runs in these files, into its memory.

    Raises ``UserError`` for what they do not hold, or hold in another size.
    """
    fill_from(folder, stored_runs(folder, files), wanted)


@torch.no_grad()
def fill_from(folder: Path, stored: Mapping[str, StoredRuns], wanted: Mapping[str, Part]) -> None:
    """``fill`` with the places of all tensors known."""
    by_file: dict[str, list[tuple[str, int, int, int]]] = defaultdict(list)
    for name, part in wanted.items():
        held = stored.get(name, StoredRuns(part.size, ()))
        if held.size != part.size:
            difference = f"its {name} has {held.size} elements, not {part.size}"
            raise foreign_checkpoint_error(str(folder), difference)
        place, end = part.first, part.first + part.values.numel()
        for run in held.runs:
            if run.first <= place < min(run.end, end):
                until = min(run.end, end)
                by_file[run.file].append((name, place - run.first, until - run.first, place - part.first))
                place = until
        if place < end or name not in stored:
            raise foreign_checkpoint_error(str(folder), f"it has no {name}")
    for file, copies in by_file.items():
        with safe_open(folder / file, "pt") as opened:
            for name, first, end, place in copies:
                values = wanted[name].values
                values[place : place + end - first].copy_(opened.get_slice(name)[first:end])


def stored_runs(folder: Path, files: Sequence[str]) -> dict[str, StoredRuns]:
    """Where every tensor lies in these files, by their headers. Raises ``UserError`` for one that cannot be read."""
    sizes: dict[str, int] = {}
    runs: dict[str, list[Run]] = defaultdict(list)
    for file in files:
        try:
            with safe_open(folder / file, "pt") as opened:
                metadata = msgspec.json.decode((opened.metadata() or {}).get(RUNS, ""), type=dict[str, tuple[int, int]])
                lengths = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
        except (SafetensorError, msgspec.MsgspecError, RecursionError) as error:
            raise foreign_checkpoint_error(str(folder), f"{file} cannot be read: {error}") from None
        for name, shape in lengths.items():
            first, size = metadata.get(name, (0, -1))
            if len(shape) != 1 or first < 0 or size != sizes.setdefault(name, size):
                raise foreign_checkpoint_error(str(folder), f"{file} says other things of {name} than others")
            runs[name].append(Run(file, first, first + shape[0]))
    return {name: StoredRuns(sizes[name], tuple(sorted(of, key=lambda run: run.first))) for name, of in runs.items()}
