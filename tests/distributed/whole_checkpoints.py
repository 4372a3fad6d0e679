"""Checkpoints of ranks in tests, written and read at once."""

from __future__ import annotations

from pathlib import Path

from arachnec.backends.torch_distributed.checkpoints.checkpoint import Checkpoints, newest, restore
from arachnec.checkpoint.folder import Position
from arachnec.checkpoint.parts import State


def save(folder: Path, state: State, position: Position) -> None:
    """Returns when it is whole. Collective."""
    checkpoints = Checkpoints(folder)
    checkpoints.save(state, position)
    checkpoints.finish()
    checkpoints.close()


def load(folder: Path, state: State, wanted: Position) -> Position | None:
    """Read the newest into ``state`` in place; None where there is none. Collective."""
    whole = newest(folder)
    if whole is not None:
        restore(whole, state, wanted)
    return None if whole is None else whole.position
