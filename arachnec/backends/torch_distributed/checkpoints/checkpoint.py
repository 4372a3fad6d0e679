"""Checkpoints of a run on several ranks, written while training goes on.

Every rank copies what it writes, and a thread puts that on the disk; ``poll`` at the end of a step asks whether all
have done so, and rank 0 then makes the checkpoint whole. It fits any number of ranks: see ``arachnec.checkpoint``.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch.distributed as dist
from safetensors import SafetensorError

from arachnec.checkpoint.files import FileRecord, StoredRuns, fill, foreign_checkpoint_error, stored_runs, write_file
from arachnec.checkpoint.folder import (
    Commit,
    Position,
    committed,
    earlier_format,
    file_of,
    is_intact,
    prune,
    read_commit,
    step_folder,
    write_commit,
)
from arachnec.checkpoint.parts import Part, State, part_of, written_by
from arachnec.ir.diagnostic import refused, user_error
from arachnec.runtime.agreement import gather_values

KEPT = 2


class _Written(msgspec.Struct, frozen=True):
    """A rank's answer: its file, or why there is none."""

    file: FileRecord | None = None
    error: str | None = None


@dataclass
class _Pending:
    path: Path
    position: Position
    own: Future[_Written]


class Checkpoints:
    """The checkpoints of a run in one folder, of which the newest ``keep`` stay. Every method is collective."""

    def __init__(self, folder: Path, keep: int = KEPT) -> None:
        self._folder = folder
        self._keep = keep
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: _Pending | None = None

    def save(self, state: State, position: Position) -> None:
        """Begin a checkpoint of the state as it is now; the one before is finished first."""
        self.finish()
        path = step_folder(self._folder, position.steps)
        if dist.get_rank() == 0:
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
        dist.barrier()
        own = written_by(state, dist.get_rank(), dist.get_world_size())
        copies = {name: replace(part, values=part.values.detach().to("cpu", copy=True)) for name, part in own.items()}
        self._pending = _Pending(path, position, self._thread.submit(_write, path, copies))

    def poll(self) -> None:
        """Make the checkpoint whole where every rank has written its file; else leave it for later."""
        if self._pending is not None:
            own = self._pending.own
            self._conclude(self._pending, own.result() if own.done() else None)

    def finish(self) -> None:
        """Wait until the checkpoint is whole."""
        if self._pending is not None:
            self._conclude(self._pending, self._pending.own.result())

    def close(self) -> None:
        """End the thread. Not collective; what is not whole by now will not be."""
        self._thread.shutdown(wait=True)

    def _conclude(self, pending: _Pending, own: _Written | None) -> None:
        """Raises ``UserError``, on every rank, where one could not write."""
        answers = gather_values(own, _Written | None)
        if any(answer is None for answer in answers):
            return
        self._pending = None
        problem = next(((r, a.error) for r, a in enumerate(answers) if a is not None and a.error is not None), None)
        if problem is None and dist.get_rank() == 0:
            try:
                files = [answer.file for answer in answers if answer is not None and answer.file is not None]
                write_commit(pending.path, pending.position, files)
                prune(self._folder, self._keep, pending.position.steps)
            except OSError as error:
                problem = (0, _reason(error))
        if (told := gather_values(problem, tuple[int, str] | None)[0]) is not None:
            rank, reason = told
            raise user_error(
                f"rank {rank} could not write the checkpoint: {reason}",
                help="make space, or give a --checkpoint folder on another disk; --resume goes on from the one before",
            )


@dataclass(frozen=True)
class Whole:
    """A checkpoint that is whole and undamaged."""

    path: Path
    commit: Commit

    @property
    def position(self) -> Position:
        return self.commit.position


def newest(folder: Path) -> Whole | None:
    """The newest whole and undamaged checkpoint; None where there is none. Collective.

    Raises ``UserError`` where there are only those of an earlier format.
    """
    path = _newest_intact(folder)
    if path is None:
        if earlier_format(folder):
            raise user_error(
                f"{folder} holds checkpoints of an earlier version",
                help=f"convert them once: arachnec convert-checkpoint BUILD {folder}",
            )
        return None
    commit = read_commit(path)
    assert commit is not None
    return Whole(path, commit)


def restore(whole: Whole, state: State, wanted: Position) -> None:
    """Read a checkpoint into ``state`` in place.

    ``wanted`` says what this is a run of, and how many clips that many steps have. Raises ``UserError`` for a
    checkpoint of another model, of other batches of clips, of steps of other batches, another seed or count of clips.
    """
    if difference := _difference(whole.position, wanted):
        raise foreign_checkpoint_error(str(whole.path), difference)
    parts: dict[str, Part] = {name: part_of(value) for name, value in state.items()}
    fill(whole.path, [record.name for record in whole.commit.files], parts)


def tensors_of(whole: Whole) -> Mapping[str, StoredRuns]:
    """What a checkpoint holds by name, from its files' headers."""
    return stored_runs(whole.path, [record.name for record in whole.commit.files])


def demand_empty(folder: Path) -> None:
    """A run that does not resume must not write among the checkpoints of another. Raises ``UserError``."""
    if whole := committed(folder):
        commit = read_commit(whole[0])
        raise user_error(
            f"{folder} holds checkpoints, the newest of step {commit.position.steps if commit else 0}",
            help="add --resume to go on from it, or give another --checkpoint folder",
        )


def demand_own(folder: Path, model: str, seed: int, accumulate: int) -> None:
    """What can be said of the newest checkpoint before ranks read it: that it is of another model file, seed or count
    of batches. Raises ``UserError``."""
    commit = read_commit(whole[0]) if (whole := committed(folder)) else None
    if commit is None:
        return
    wanted = msgspec.structs.replace(commit.position, model=model, seed=seed, accumulate=accumulate)
    if difference := _difference(commit.position, wanted):
        raise foreign_checkpoint_error(str(whole[0]), difference)


def _newest_intact(folder: Path) -> Path | None:
    """Every rank reads back its share of a checkpoint's files, once; all come to the same answer."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for name in gather_values([path.name for path in committed(folder)], list[str])[0]:
        commit = read_commit(folder / name)
        files = commit.files if commit is not None else ()
        intact = commit is not None and all(is_intact(folder / name, record) for record in files[rank::world])
        if all(gather_values(intact, bool)):
            return folder / name
    return None


def _difference(kept: Position, wanted: Position) -> str:
    if kept.model != wanted.model:
        return "it was made with another model file"
    if kept.data != wanted.data:
        return "it was made with other clips, or in other batches"
    if kept.accumulate not in (0, wanted.accumulate):
        return f"a step of it is {kept.accumulate} global batches, of this run {wanted.accumulate}"
    if kept.seed != wanted.seed:
        return f"it draws with seed {kept.seed}, this run with {wanted.seed}"
    if kept.init != wanted.init:
        return "its frozen weights, which it does not hold, came from another --init folder, or from none"
    if kept.clips not in (0, wanted.clips):
        return f"it counts {kept.clips:,} clips, and {kept.steps:,} steps of these batches have {wanted.clips:,}"
    return ""


def _write(path: Path, parts: dict[str, Part]) -> _Written:
    try:
        return _Written(file=write_file(path / file_of(dist.get_rank()), parts))
    except OSError as error:
        return _Written(error=_reason(error))
    except SafetensorError as error:  # a full disk, among others
        return _Written(error=str(error))


def _reason(error: OSError) -> str:
    diagnostic = refused(error)
    return diagnostic.message if diagnostic is not None else str(error)
