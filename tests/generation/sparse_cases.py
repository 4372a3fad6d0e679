"""Predictors of the tiny pair as a run would have left them, in a checkpoint written by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from arachnec.checkpoint.class_states import CLASSES, ClassState, class_tensor
from arachnec.checkpoint.files import write_file
from arachnec.checkpoint.folder import Position, file_of, step_folder, write_commit
from arachnec.checkpoint.parts import Part

HEADS, SIZE, RANK = 3, 4, 2
DENSITIES = (0.3, 0.5, 0.7)
# Sparse kernels so fast, and a choice so cheap, that every layer that may be sparse is.
FORCED = "overhead=0ms,forward_speed=1e6,choice_speed=1e6,group=4,block=2"


def checkpoint(
    folder: Path,
    ready: Mapping[str, bool] | None = None,
    densities: tuple[float, ...] = DENSITIES,
    heads: int = HEADS,
    size: int = SIZE,
    rank: int = RANK,
    classes: Mapping[int, tuple[float, ...]] | None = None,
) -> Path:
    """A folder of checkpoints with predictors of the blocks in ``ready``, by default of both, both ready;
    ``classes`` of length may have densities of their own."""
    rng, tensors = torch.Generator().manual_seed(7), {}
    for path, is_ready in ({"blocks.0": True, "blocks.1": True} if ready is None else ready).items():
        row = [*(1 - density for density in densities), *densities, float(is_ready)]
        tensors[f"predictor/layer/{path}.0"] = torch.tensor(row, dtype=torch.float64)
        if classes is not None:
            states = {n: ClassState((0.5,) * heads, own, (1.0,) * heads) for n, own in classes.items()}
            tensors[f"{CLASSES}{path}.0"] = class_tensor(states, heads)
        for side in ("query", "key"):
            tensors[f"predictor/{side}/{path}.0"] = torch.randn(heads * size * rank, generator=rng)
    tensors["master/embed.weight"] = torch.zeros(3)
    path = step_folder(folder, 5)
    path.mkdir(parents=True)
    record = write_file(path / file_of(0), {n: Part(v, 0, v.numel()) for n, v in tensors.items()})
    write_commit(path, Position(5, 0, "model"), [record])
    return folder


def predictors(**places: Path) -> str:
    """What a sampler file says of them."""
    named = {name: str(place) for name, place in places.items()}
    return f"\n\ndef predictors():\n    return {named!r}\n"
