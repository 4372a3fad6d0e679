"""Predictors of sparse attention that a run has trained, to sample with. In: where they lie. Out: by layer its
densities, whether it is ready, and its projections.

They lie in a folder of checkpoints, the newest whole one counts, in one step's folder, or in the file that an export
writes, which is of the same form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from arachnec.checkpoint.class_states import CLASSES, class_numbers, classes_of
from arachnec.checkpoint.files import StoredRuns, fill_from, stored_runs, write_file
from arachnec.checkpoint.folder import intact
from arachnec.checkpoint.parts import Part
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.head_density import ByLength, Heads

FILE = "sparse_attention.safetensors"  # as an export names it
LAYER, QUERY, KEY = "predictor/layer/", "predictor/query/", "predictor/key/"
LEAST = 1e-6  # of a density

Layer = tuple[str, int]  # the path of a block, and the number of an attention in it


def no_predictors_error(place: str, reason: str) -> UserError:
    return user_error(
        f"{place} holds no trained predictors of sparse attention: {reason}",
        help=(
            "give the folder of checkpoints of a run that was compiled with `sparsify`, or of its export; or "
            "sample without them"
        ),
    )


@dataclass(frozen=True)
class TrainedLayer:
    """What a run has measured of a layer: by head and class of length the share of key blocks that a group of queries
    needs, and whether its predictor is ``ready``: the layer was sparse in the run's next step."""

    densities: ByLength
    ready: bool


@dataclass(frozen=True)
class TrainedPredictors:
    """Of one model. ``folder`` holds the files of ``stored``."""

    place: str
    folder: Path
    layers: Mapping[Layer, TrainedLayer]
    stored: Mapping[str, StoredRuns]

    def features(self, layer: Layer) -> int:
        """Numbers of a layer's projection of queries: heads x head size x rank."""
        held = self.stored.get(f"{QUERY}{_key(layer)}")
        return 0 if held is None else held.size

    def projections(self, layer: Layer, size: tuple[int, int, int]) -> tuple[Tensor, Tensor]:
        """Of queries and of keys, [H, D, r] each. Raises ``UserError`` where they have another ``size``."""
        values = [torch.empty(size), torch.empty(size)]
        parts = {
            f"{side}{_key(layer)}": Part(value.view(-1), 0, value.numel())
            for side, value in zip((QUERY, KEY), values, strict=True)
        }
        fill_from(self.folder, self.stored, parts)
        return values[0], values[1]


def trained_predictors(place: Path) -> TrainedPredictors:
    """Raises ``UserError`` where there are none, or where their files are damaged."""
    folder, files = _files(place)
    stored = stored_runs(folder, files)
    rows = {name.removeprefix(LAYER): held for name, held in stored.items() if name.startswith(LAYER)}
    if not rows:
        raise no_predictors_error(str(place), "its run had no sparse layers")
    layers: dict[Layer, TrainedLayer] = {}
    for name, held in rows.items():
        path, _, number = name.rpartition(".")
        if not number.isdigit() or held.size < 3 or held.size % 2 == 0:
            raise no_predictors_error(str(place), f"`{name}` is no layer's name and state")
        heads = held.size // 2
        values = _read(folder, stored, LAYER + name, held.size)
        try:
            of_class = classes_of(_read(folder, stored, CLASSES + name, class_numbers(heads)), heads)
        except ValueError as wrong:
            raise no_predictors_error(str(place), f"the state of `{name}` {wrong}") from None
        if not bool(values.isfinite().all()):
            raise no_predictors_error(str(place), f"the state of `{name}` is not finite")
        every = _shares(values[heads : 2 * heads].tolist())
        densities = ByLength(every, tuple((length, _shares(own.densities)) for length, own in of_class.items()))
        layers[path, int(number)] = TrainedLayer(densities, bool(values[-1]))
    return TrainedPredictors(str(place), folder, layers, stored)


def _read(folder: Path, stored: Mapping[str, StoredRuns], name: str, size: int) -> Tensor:
    """A tensor of 64 bits; an empty one where there is none."""
    values = torch.empty(size if name in stored else 0, dtype=torch.float64)
    if name in stored:
        fill_from(folder, stored, {name: Part(values, 0, size)})
    return values


def _shares(values: Sequence[float]) -> Heads:
    return tuple(min(1.0, max(LEAST, value)) for value in values)


def write_predictors(folder: Path, stored: Mapping[str, StoredRuns], file: Path, prefix: str = "") -> bool:
    """Write those of a checkpoint's files in ``folder`` into a file of their own, paths without ``prefix``; False where
    there are none."""
    parts: dict[str, Part] = {}
    for name, held in stored.items():
        kind = next((kind for kind in (LAYER, CLASSES, QUERY, KEY) if name.startswith(kind)), None)
        if kind is not None:
            dtype = torch.float64 if kind in (LAYER, CLASSES) else torch.float32
            part = Part(torch.empty(held.size, dtype=dtype), 0, held.size)
            fill_from(folder, stored, {name: part})
            parts[kind + name.removeprefix(kind).removeprefix(prefix)] = part
    if parts:
        write_file(file, parts)
    return bool(parts)


def _files(place: Path) -> tuple[Path, list[str]]:
    if place.is_file():
        return place.parent, [place.name]
    if (place / FILE).is_file():
        return place, [FILE]
    for path, commit in intact(place):
        return path, [record.name for record in commit.files]
    raise no_predictors_error(str(place), "there is no whole checkpoint, and no " + FILE)


def _key(layer: Layer) -> str:
    return f"{layer[0]}.{layer[1]}"
