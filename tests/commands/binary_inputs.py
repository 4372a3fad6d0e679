"""Files that are no text, whole and damaged, and what reads them: for the tests and fuzzing of hostile input."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pyarrow
import pyarrow.parquet
import torch
from safetensors.torch import load_file, save_file

from arachnec.checkpoint.files import stored_runs
from arachnec.data.clip import VideoClip
from arachnec.data.encoded_file import TENSOR, read_encoded
from arachnec.data.manifest import read_manifest
from arachnec.data.parquet_clips import read_long_manifest
from arachnec.kernels.sparse.cube_sides import VERSION
from arachnec.model_state.key_list_files import RULE, read_lists
from arachnec.models.weight_files import weight_files

WEIRD = (None, True, -1, 0, 1e308, 2**63, "", "\x1b[2J", "a" * 5000, [], {}, [[]] * 50, "../../x", "F4", [0, 2**62])
ROWS = {"id": ["a", "b"], "frames": [9, 5], "height": [32, 32], "width": [48, 48], "text_tokens": [8, 8]}


def _tensors(path: Path) -> None:
    runs = {"w": [0, 12], "b": [3, 4]}
    save_file({"w": torch.zeros(12), "b": torch.ones(1)}, path, metadata={"runs": json.dumps(runs)})


def _lists(path: Path) -> None:
    parts = {"indices": [0, 1, 0], "counts": [[2, 1]], "shares": [[0, 0, 2]]}
    tensors = {f"a|0|{name}": torch.tensor(x, dtype=torch.int32) for name, x in parts.items()}
    save_file(tensors, path, metadata={RULE: str(VERSION)})


def _read_lists(path: Path) -> object:
    place = path.parent / "step-3"
    place.mkdir(exist_ok=True)
    path.replace(place / "rank-0.safetensors")
    return read_lists(path.parent, 3)


def _encoded(path: Path) -> object:
    return read_encoded(VideoClip("a", 9, 32, 48, 8, cached={"vae": path}))


def _weights(path: Path) -> object:
    known = weight_files(path.parent)
    return [known.read(name) for name in known.tensors]


def _read_long(path: Path) -> object:
    """As one that is too long for a list."""
    long, _ = read_long_manifest(path, 1)
    return list(islice(long.drawn(1, stratified=True), 1000))


# name: what writes it, what reads it
BINARY: dict[str, tuple[Callable[[Path], None], Callable[[Path], object]]] = {
    "clips.parquet": (lambda path: pyarrow.parquet.write_table(pyarrow.table(ROWS), path), read_manifest),
    "long.parquet": (lambda path: pyarrow.parquet.write_table(pyarrow.table(ROWS), path), _read_long),
    "rank-00000.safetensors": (_tensors, lambda path: stored_runs(path.parent, [path.name])),
    "lists.safetensors": (_lists, _read_lists),
    "vae.safetensors": (lambda path: save_file({TENSOR: torch.zeros(1, 2, 3)}, path), _encoded),
    "model.safetensors": (_tensors, _weights),
}


COLUMNS: tuple[list[object], ...] = (
    [None, None], [-1, 2**62], [float("nan"), 1e308], ["[/bold]", "a" * 5000], [b"\xff\x00", b""], [[1, 2], []],
    [{"a": 1}, {"a": None}], [True, False], ["../../x", "\x1b[2J"], [0, 0], ["a", "a"], [9.0, 4.5],
)  # fmt: skip
NAMES = ("iteration", "path", "clips", "caption", "cached.vae", "vae", "\x1b[2J", "a" * 3000, "num_frames", "text")
SHAPES = ((), (0,), (1,), (3,), (1, 2), (1, 3), (2, 2), (3, 1, 1))


def other_values(name: str, path: Path, rng: random.Random) -> None:
    """A sound file of the kind, with values, types, shapes and names that it should not have."""
    if name.endswith(".parquet"):
        columns = dict(ROWS)
        for _ in range(rng.randint(1, 2)):
            columns[rng.choice((*ROWS, *NAMES))] = rng.choice(COLUMNS)  # type: ignore[assignment]
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
        return
    own = load_file(path)
    for key in rng.sample(sorted(own), rng.randint(1, len(own))):
        shape = rng.choice((*SHAPES, tuple(own[key].shape)))
        dtype = rng.choice((own[key].dtype, own[key].dtype, torch.int64, torch.bool, torch.bfloat16, torch.uint8))
        own[rng.choice((key, key, "other", "a|0"))] = torch.full(shape, rng.choice((-1, 0, 1, 2, 100))).to(dtype)
    runs = json.dumps(rng.choice((None, [], {"w": [-1, 3]}, {"w": [0, 2**62]}, {"w": [2, 2], "b": [0, 1]}, "x")))
    save_file(own, path, metadata={"runs": runs})


def damaged_bytes(name: str, data: bytes, rng: random.Random) -> bytes:
    """Bits flipped, pieces cut out, doubled or overwritten; of safetensors the header's values changed too."""
    if name.endswith(".safetensors") and rng.random() < 0.6:
        return _other_header(data, rng)
    for _ in range(rng.randint(1, 4)):
        at, way = rng.randrange(len(data) + 1), rng.randrange(4)
        if way == 0:
            data = data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        elif way == 1:
            data = data[:at]
        elif way == 2:
            data = data[:at] + data[at : at + 40] * 50 + data[at + 40 :]
        else:
            data = data[:at] + rng.randbytes(rng.randrange(12)) + data[at + 8 :]
    return data


def _other_header(data: bytes, rng: random.Random) -> bytes:
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    for _ in range(rng.randint(1, 2)):
        tree, key = header, rng.choice(sorted(header))
        while isinstance(tree[key], dict | list) and tree[key] and rng.random() < 0.8:
            tree = tree[key]
            key = rng.choice(sorted(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
        if isinstance(tree, dict) and rng.random() < 0.2:
            tree["a" * rng.choice((1, 3000))] = tree.pop(key)
        else:
            tree[key] = json.loads(json.dumps(rng.choice((*WEIRD, rng.choice(list(header.values()))))))
        if not header:
            break
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[8 + size :]
