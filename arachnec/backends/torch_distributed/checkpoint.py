"""Checkpoints by ``torch.distributed.checkpoint`` that a dying rank cannot spoil.

Every step gets a directory of its own; ``commit.json``, with the hash of every file, is renamed into place last. A
directory without it, or whose files differ from it, does not exist for ``load``. The two newest are kept. Nothing in a
checkpoint depends on the number of ranks: every rank reads all of it.

``torch.distributed.checkpoint`` keeps its metadata as a pickle: read checkpoints only from where you would run code.
"""

from __future__ import annotations

import hashlib
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from arachnec.ir.diagnostic import Diagnostic, UserError

KEPT = 2
COMMIT = "commit.json"


class Position(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a run stands: optimizer steps done (the next step's data follow from it), and the seed it draws with."""

    steps: int
    seed: int
    model: str  # digest of the model file: a checkpoint fits the model it was made with


class Commit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    position: Position
    sha256: dict[str, str]


@dataclass(frozen=True)
class NoCheckpoint(Diagnostic):
    title: ClassVar[str] = "no complete checkpoint in {folder}"
    help: ClassVar[str] = "leave --resume away to start from the beginning"
    folder: str


@dataclass(frozen=True)
class ForeignCheckpoint(Diagnostic):
    title: ClassVar[str] = "the checkpoint {folder} does not fit this run: {difference}"
    help: ClassVar[str] = "give another --checkpoint folder, or leave --resume away"
    folder: str
    difference: str


def save(folder: Path, tensors: Mapping[str, Tensor], position: Position) -> Path:
    """Write one checkpoint; every rank calls this with the same tensors. Returns its directory."""
    path = folder / f"step-{position.steps:08d}"
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
    dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_state(dict(tensors), checkpoint_id=path)
    dist.barrier()
    if first:
        _commit(path, position)
        for old in complete(folder)[KEPT:]:
            shutil.rmtree(old, ignore_errors=True)
    dist.barrier()
    return path


def load(folder: Path, tensors: Mapping[str, Tensor], model: str) -> Position:
    """Read the newest complete checkpoint into ``tensors`` in place; every rank calls this.

    Raises ``UserError`` if there is none, or if it was made by another model.
    """
    found = complete(folder)
    if not found:
        raise UserError(NoCheckpoint(None, str(folder)))
    path = found[0]
    position = _commit_of(path).position
    if position.model != model:
        raise UserError(ForeignCheckpoint(None, str(path), "it was made with another model file"))
    kept = FileSystemReader(path).read_metadata().state_dict_metadata
    for name, tensor in sorted(tensors.items()):
        if name not in kept:
            raise UserError(ForeignCheckpoint(None, str(path), f"it has no {name}"))
        size = getattr(kept[name], "size", None)
        if size != tensor.shape:
            raise UserError(ForeignCheckpoint(None, str(path), f"its {name} is {size}, not {tensor.shape}"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        load_state(dict(tensors), checkpoint_id=path)
    return position


def complete(folder: Path) -> list[Path]:
    """The complete checkpoints, newest first."""
    return [path for path in sorted(folder.glob("step-*"), reverse=True) if _is_complete(path)]


def _commit(path: Path, position: Position) -> None:
    hashes = {file.name: _sha256(file) for file in sorted(path.iterdir())}
    draft = path / f"{COMMIT}.draft"
    draft.write_bytes(msgspec.json.encode(Commit(position, hashes)))
    draft.rename(path / COMMIT)


def _commit_of(path: Path) -> Commit:
    return msgspec.json.decode((path / COMMIT).read_bytes(), type=Commit)


def _is_complete(path: Path) -> bool:
    try:
        commit = _commit_of(path)
        return all(_sha256(path / name) == digest for name, digest in commit.sha256.items())
    except (OSError, msgspec.MsgspecError):
        return False


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
