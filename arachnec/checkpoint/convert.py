"""Checkpoints of the earlier format, which ``torch.distributed.checkpoint`` wrote, into the present one.

Their metadata is a pickle. It is read by an unpickler that knows the classes such metadata is made of and no others, so
no code of the file runs; tensors are read by ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import io
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from arachnec.checkpoint.files import sha256, write_file
from arachnec.checkpoint.folder import COMMIT, Position, earlier_format, file_of, write_commit
from arachnec.checkpoint.parts import part_of
from arachnec.ir.diagnostic import UserError, user_error

_METADATA = "torch.distributed.checkpoint.metadata"
_KNOWN = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata")),
    *(
        (_METADATA, name)
        for name in ("TensorProperties", "BytesStorageMetadata", "StorageMeta", "_MEM_FORMAT_ENCODING")
    ),
    *(("torch.distributed.checkpoint.filesystem", name) for name in ("_StorageInfo", "_StoragePrefix")),
    *(("torch", name) for name in ("Size", "float32", "float64", "bfloat16", "float16", "int64", "int32", "bool")),
    *(("torch", name) for name in ("strided", "contiguous_format", "preserve_format", "uint8", "int8", "int16")),
    *(("torch.serialization", "_get_layout"), ("collections", "OrderedDict"), ("builtins", "dict")),
    *(("pathlib", name) for name in ("PosixPath", "Path", "PurePosixPath")),
    ("pathlib._local", "PosixPath"),
}


class _OldPosition(msgspec.Struct, frozen=True):
    steps: int
    seed: int
    model: str


class _OldCommit(msgspec.Struct, frozen=True):
    position: _OldPosition
    sha256: dict[str, str]


def cannot_convert_error(path: str, reason: str) -> UserError:
    return user_error(
        f"{path} cannot be converted: {reason}", help="move it away and convert the one before it, or begin anew"
    )


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint needs")
        return super().find_class(module, name)


def convert_newest(folder: Path, data: str) -> Path:
    """Rewrite the newest whole checkpoint of the earlier format, in its place; ``data`` is the digest of its clips.

    Raises ``UserError`` where there is none, or where it is damaged.
    """
    whole = [path for path in earlier_format(folder) if (path / COMMIT).is_file()]
    if not whole:
        raise user_error(
            f"{folder} holds no checkpoint of the earlier format",
            help="give the folder that was --checkpoint of the run",
        )
    path = whole[-1]
    try:
        commit = msgspec.json.decode((path / COMMIT).read_bytes(), type=_OldCommit)
        _demand_intact(path, commit)
        tensors = _tensors(path)
    except UserError:
        raise
    except Exception as error:  # unpickling damaged bytes raises what it likes
        reason = f"it is damaged ({type(error).__name__}: {' '.join(str(error).split())})"
        raise cannot_convert_error(str(path), reason) from error
    draft = folder / f".converted-{path.name}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    position = Position(commit.position.steps, commit.position.seed, commit.position.model, 0, data)
    record = write_file(draft / file_of(0), {name: part_of(value.contiguous()) for name, value in tensors.items()})
    write_commit(draft, position, [record])
    kept = folder / f"earlier-{path.name}"
    path.rename(kept)
    draft.rename(path)
    return path


def _demand_intact(path: Path, commit: _OldCommit) -> None:
    """Raises ``UserError`` for a file that is not what was written."""
    for name, digest in commit.sha256.items():
        if Path(name).name != name or not (path / name).is_file() or sha256(path / name) != digest:
            raise cannot_convert_error(str(path), f"its file {name} is damaged or gone")


def _tensors(path: Path) -> dict[str, Tensor]:
    with (path / ".metadata").open("rb") as file:
        metadata = _Restricted(file).load()
    places: Mapping[Any, Any] = metadata.storage_data
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.state_dict_metadata.items()
        if hasattr(entry, "size")
    }
    for index, place in places.items():
        if index.fqn not in tensors or Path(place.relative_path).name != place.relative_path:
            continue
        with (path / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            chunk = torch.load(io.BytesIO(file.read(place.length)), map_location="cpu", weights_only=True)
        whole = tensors[index.fqn]
        for dimension, first in enumerate(index.offset or ()):
            whole = whole.narrow(dimension, first, chunk.shape[dimension])
        whole.copy_(chunk)
    return tensors
