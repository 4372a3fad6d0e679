"""Weights as safetensors files: one, or shards and an index. In: a folder. Out: tensors by name, one at a time.

The names are those that Diffusers and transformers write: ``diffusion_pytorch_model.safetensors``, or
``diffusion_pytorch_model-00001-of-00002.safetensors`` and ``diffusion_pytorch_model.safetensors.index.json``. Nothing
that is read is a pickle.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from arachnec.checkpoint.files import save_tensors
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.limits import LARGEST_DATA
from arachnec.models.weights_there import demand_weights_there, no_weights_error

SUFFIX, INDEX = ".safetensors", ".safetensors.index.json"
PREFERRED = ("diffusion_pytorch_model", "model")  # of several in a folder, what Diffusers and transformers load
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
SHARD_BYTES = 5 * 10**9  # of a file that is written
SAMPLED = 4096  # elements of a tensor that its fingerprint reads
FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def pickle_error(path: Path) -> UserError:
    return user_error(
        f"{path} is a pickle, which may run code, and is not read",
        help="convert it once: load the model where you trust it, and save_pretrained(FOLDER)",
    )


def unreadable_weights_error(path: str, reason: str) -> UserError:
    return user_error(f"{path} cannot be read: {reason}", help="copy or download it again")


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file; ``dtype`` as safetensors names it, such as ``BF16``."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class WeightFiles:
    """The tensors of a model as they lie on the disk, by name."""

    folder: Path
    tensors: Mapping[str, StoredTensor]

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU, in the precision it is stored in. Raises ``UserError`` for a damaged file."""
        return self._opened(name, lambda opened: opened.get_tensor(name))

    def _opened(self, name: str, reading: Callable[[Any], Tensor]) -> Tensor:
        file = self.tensors[name].file
        try:
            with safe_open(file, "pt") as opened:
                return reading(opened)
        except (SafetensorError, OSError) as error:
            raise unreadable_weights_error(str(file), _first_line(error)) from None

    def piece(self, name: str, start: int, size: int) -> Tensor:
        """``size`` elements of the flattened tensor from ``start`` on, as ``read``.

        Of the file only the rows that they lie in are read. A row is an entry of the first dimension that is not 1.
        """
        shape = self.tensors[name].shape
        leading = next((place for place, length in enumerate(shape) if length != 1), len(shape))
        if not size or leading == len(shape):
            return self.read(name).reshape(-1)[start : start + size]
        row = torch.Size(shape[leading + 1 :]).numel()
        first, last = start // row, -(-(start + size) // row)
        rows = self._opened(
            name, lambda opened: opened.get_slice(name)[(slice(None),) * leading + (slice(first, last),)]
        )
        return rows.reshape(-1)[start - first * row :][:size]

    def fingerprint(self) -> str:
        """SHA-256 of names, shapes, precisions and the first elements of every tensor: not of all values.

        Raises as ``read``.
        """
        digest = hashlib.sha256()
        for name in sorted(self.tensors):
            stored = self.tensors[name]
            digest.update(repr((name, stored.shape, stored.dtype)).encode())
            row = torch.Size(stored.shape[1:]).numel()
            rows = min(stored.shape[0], max(1, SAMPLED // max(1, row))) if stored.shape else 1
            sample = self.piece(name, 0, min(SAMPLED, rows * row))
            digest.update(sample.reshape(-1)[:SAMPLED].contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


_FOUND: ContextVar[list[WeightFiles]] = ContextVar("found weights")


@contextmanager
def found_weights() -> Iterator[list[WeightFiles]]:
    """What ``weight_files`` finds while this lasts."""
    folders: list[WeightFiles] = []
    token = _FOUND.set(folders)
    try:
        yield folders
    finally:
        _FOUND.reset(token)


def weight_files(folder: Path) -> WeightFiles:
    """Find the weights in ``folder``, or of one file; only the files' headers are read.

    Raises ``UserError`` where there are none, several to choose from, or one that cannot be read.
    """
    files = _weight_files(folder)
    _FOUND.get([]).append(files)
    return files


def _weight_files(folder: Path) -> WeightFiles:
    demand_weights_there(folder)
    if folder.is_file() and folder.suffix in PICKLES:
        raise pickle_error(folder)
    if folder.is_file() and folder.suffix != SUFFIX:
        raise no_weights_error(str(folder), f"it is no {SUFFIX} file")
    if folder.is_file():
        return WeightFiles(folder, _headers([folder]))
    names = sorted(path.name for path in folder.iterdir() if path.is_file())
    indices = [name for name in names if name.endswith(INDEX)]
    files = [name for name in names if name.endswith(SUFFIX)]
    for stem in PREFERRED:
        if f"{stem}{INDEX}" in indices:
            return _sharded(folder, f"{stem}{INDEX}")
        if f"{stem}{SUFFIX}" in files:
            return WeightFiles(folder, _headers([folder / f"{stem}{SUFFIX}"]))
    if len(indices) > 1 or (len(files) > 1 and not indices):
        reason = f"it has {', '.join(indices or files)}, and none of them is {PREFERRED[0]}{SUFFIX}"
        raise no_weights_error(str(folder), reason)
    if indices:
        return _sharded(folder, indices[0])
    if files:
        return WeightFiles(folder, _headers([folder / files[0]]))
    pickled = next((name for name in names if name.endswith(PICKLES)), None)
    if pickled is not None:
        raise pickle_error(folder / pickled)
    raise no_weights_error(str(folder), "there is no .safetensors file in it")


def write_weights(
    folder: Path,
    names: Sequence[str],
    sizes: Mapping[str, int],
    value: Callable[[str], Tensor],
    *,
    stem: str = PREFERRED[0],
    shard_bytes: int = SHARD_BYTES,
) -> list[Path]:
    """Write the tensors of ``names``, each made by ``value`` when its shard is written: one shard is held at a time.

    ``sizes`` are their bytes. More than ``shard_bytes`` of them become several files and an index. Raises OSError.
    """
    shards = _shards(names, sizes, shard_bytes)
    count = len(shards)
    placed: dict[str, str] = {}
    written: list[Path] = []
    for number, shard in enumerate(shards, 1):
        name = f"{stem}{SUFFIX}" if count == 1 else f"{stem}-{number:05d}-of-{count:05d}{SUFFIX}"
        save_tensors({key: value(key).contiguous() for key in shard}, folder / name, {"format": "pt"})
        placed |= dict.fromkeys(shard, name)
        written.append(folder / name)
    if count > 1:
        index = {"metadata": {"total_size": sum(sizes[name] for name in names)}, "weight_map": placed}
        (folder / f"{stem}{INDEX}").write_bytes(msgspec.json.format(msgspec.json.encode(index)))
        written.append(folder / f"{stem}{INDEX}")
    return written


def _shards(names: Sequence[str], sizes: Mapping[str, int], limit: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    held = 0
    for name in names:
        if shards[-1] and held + sizes[name] > limit:
            shards.append([])
            held = 0
        shards[-1].append(name)
        held += sizes[name]
    return shards


def _sharded(folder: Path, name: str) -> WeightFiles:
    path = folder / name
    try:
        if path.stat().st_size > LARGEST_DATA:
            raise unreadable_weights_error(str(path), f"it is larger than {LARGEST_DATA // 2**20} MiB")
        index = msgspec.json.decode(path.read_bytes(), type=_Index)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise unreadable_weights_error(str(path), _first_line(error)) from None
    files = sorted(set(index.weight_map.values()))
    outside = next((file for file in files if Path(file).name != file), None)
    if outside is not None:
        raise unreadable_weights_error(str(path), f"it names {outside}, which is not in its folder")
    tensors = _headers([folder / file for file in files])
    absent = sorted(set(index.weight_map) - set(tensors))
    if absent:
        raise unreadable_weights_error(str(path), f"it names {absent[0]}, which its files do not hold")
    return WeightFiles(folder, {key: tensors[key] for key in index.weight_map})


def _headers(files: Iterable[Path]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    header = opened.get_slice(name)
                    tensors[name] = StoredTensor(file, tuple(header.get_shape()), header.get_dtype())
        except (SafetensorError, OSError) as error:
            raise unreadable_weights_error(str(file), _first_line(error)) from None
    return tensors


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
