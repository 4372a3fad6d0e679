"""The values of a checkpoint, one whole tensor at a time. In: a folder of checkpoints. Out: fp32 tensors by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from arachnec.checkpoint.files import StoredRuns, fill_from, stored_runs
from arachnec.checkpoint.folder import Position, committed, is_intact, read_commit
from arachnec.checkpoint.parts import AVERAGE, IN_USE, MASTER, Part
from arachnec.ir.diagnostic import user_error

BUFFER = "buffer"


@dataclass(frozen=True)
class TrainedValues:
    """What a checkpoint holds. ``kind`` is which of a parameter's tensors count: its value or its average."""

    path: Path
    position: Position
    kind: str
    stored: Mapping[str, StoredRuns]

    def has(self, name: str) -> bool:
        """Whether this parameter trained."""
        return f"{MASTER}/{name}" in self.stored

    def parameter(self, name: str, shape: torch.Size) -> Tensor:
        """A parameter that trained, in fp32. Raises ``UserError`` where the checkpoint has it in another size."""
        return self._read(f"{self.kind}/{name}", shape, torch.float32)

    def buffer(self, name: str, like: Tensor) -> Tensor:
        """A buffer, as the run left it."""
        return self._read(f"{BUFFER}/{name}", like.shape, like.dtype)

    def has_buffer(self, name: str) -> bool:
        return f"{BUFFER}/{name}" in self.stored

    def _read(self, key: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        values = torch.empty(shape.numel(), dtype=dtype)
        fill_from(self.path, self.stored, {key: Part(values, 0, shape.numel())})
        return values.view(shape)


def trained_values(folder: Path, digest: str, executable: Path, *, averages: bool) -> TrainedValues:
    """Open the newest whole and undamaged checkpoint in ``folder``, or ``folder`` itself where it is one.

    ``digest`` is that of the model file of ``executable``. Raises ``UserError`` where there is none, or another's.
    """
    for path in [folder] if read_commit(folder) else committed(folder):
        commit = read_commit(path)
        if commit is None or not all(is_intact(path, record) for record in commit.files):
            continue
        if commit.position.model != digest:
            raise user_error(
                f"the checkpoint {path} was not made with the model file of {executable}",
                help="give the executable that its run was started with, or of your own loop the model file",
            )
        stored = stored_runs(path, [record.name for record in commit.files])
        if averages and not any(key.startswith(f"{AVERAGE}/") for key in stored):
            raise user_error(
                f"the checkpoint {path} has no averages of the weights",
                help="leave --ema out, or train with an average: arachnec run ... --ema 0.999",
            )
        own = IN_USE if any(key.startswith(f"{IN_USE}/") for key in stored) else MASTER
        return TrainedValues(path, commit.position, AVERAGE if averages else own, stored)
    raise user_error(
        f"{folder} holds no whole checkpoint",
        help="give the folder that was --checkpoint of the run, or one step's folder in it",
    )
