"""A folder of checkpoints: one directory a step, whole once ``commit.json`` is in it.

The files are on the disk before ``commit.json`` is renamed into place, so a rank, or a host, that dies leaves either a
whole checkpoint or none.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from arachnec.checkpoint.files import FileRecord, sha256, synced
from arachnec.ir.limits import LARGEST_DATA

COMMIT = "commit.json"
FORMAT = 2
_STEP = re.compile(r"step-(\d{8,12})")


class Position(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a run stands, and what it is a run of.

    ``steps`` optimizer steps and ``clips`` clips are done; the next step's data follow from them. ``model`` is the
    digest of the model file, ``data`` that of the clips and their global batches, ``init`` that of the weights which
    stay frozen, and which no checkpoint holds. ``source`` is what a dataset without a manifest said of its place.
    A step is ``accumulate`` global batches; 0 in checkpoints that do not say it. ``optimizer`` names the optimizer's
    class; unset in those of before, and then not in what ``digest`` is of.
    """

    steps: int
    seed: int
    model: str
    clips: int = 0
    data: str = ""
    init: str = ""
    source: str = ""
    accumulate: int = 0
    optimizer: str | msgspec.UnsetType = msgspec.UNSET


class Commit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``commit.json``. ``digest`` is the SHA-256 of the rest; those of before have none."""

    format: int
    position: Position
    files: tuple[FileRecord, ...]
    digest: str = ""


def step_folder(folder: Path, steps: int) -> Path:
    return folder / f"step-{steps:08d}"


def file_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def write_commit(path: Path, position: Position, files: Sequence[FileRecord]) -> None:
    """Make the checkpoint in ``path`` whole. Raises OSError."""
    draft = path / f"{COMMIT}.draft"
    commit = Commit(FORMAT, position, tuple(files))
    draft.write_bytes(msgspec.json.encode(msgspec.structs.replace(commit, digest=_digest(commit))))
    synced(draft)
    synced(path)
    draft.rename(path / COMMIT)
    synced(path)


def read_commit(path: Path) -> Commit | None:
    """What the checkpoint in ``path`` says of itself; None where it is not whole."""
    file = path / COMMIT
    try:
        if not file.is_file() or file.stat().st_size > LARGEST_DATA:  # a pipe would be waited for
            return None
        commit = msgspec.json.decode(file.read_bytes(), type=Commit)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    sound = (
        commit.format == FORMAT
        and commit.digest in ("", _digest(commit))
        and commit.files
        and commit.position.steps >= 0
        and _steps(path) in (commit.position.steps, -1)
        and commit.position.clips >= 0
        and all(Path(record.name).name == record.name and "\0" not in record.name for record in commit.files)
    )
    return commit if sound else None


def _digest(commit: Commit) -> str:
    return hashlib.sha256(msgspec.json.encode(msgspec.structs.replace(commit, digest=""))).hexdigest()


def committed(folder: Path) -> list[Path]:
    """The checkpoints with a commit, newest first. Whether their files are as they were written, ``is_intact`` says."""
    paths = [path for path in folder.glob("step-*") if _STEP.fullmatch(path.name)]
    return sorted((path for path in paths if read_commit(path)), key=lambda path: -_steps(path))


def is_intact(path: Path, record: FileRecord) -> bool:
    """Whether a file is there as it was written."""
    try:
        file = path / record.name
        return file.is_file() and file.stat().st_size == record.bytes and sha256(file) == record.sha256
    except OSError:
        return False


def intact(folder: Path) -> Iterator[tuple[Path, Commit]]:
    """The whole and undamaged checkpoints in ``folder``, newest first, or ``folder`` itself where it is one."""
    for path in [folder] if read_commit(folder) else committed(folder):
        commit = read_commit(path)
        if commit is not None and all(is_intact(path, record) for record in commit.files):
            yield path, commit


def earlier_format(folder: Path) -> list[Path]:
    """Checkpoints that an earlier version wrote, by ``torch.distributed.checkpoint``."""
    return sorted(path for path in folder.glob("step-*") if (path / ".metadata").is_file())


def prune(folder: Path, keep: int, steps: int) -> None:
    """Keep the newest ``keep`` whole checkpoints up to that of ``steps``, the one just made. What was never made whole
    and is older than the newest goes too.

    One of more steps was passed over when the run resumed, because a file of it was damaged: it stays, and counts for
    none.
    """
    whole = [path for path in committed(folder) if _steps(path) <= steps]
    given_up = [
        path
        for path in folder.glob("step-*")
        if _STEP.fullmatch(path.name)
        and whole
        and _steps(path) < _steps(whole[0])
        and not (path / COMMIT).exists()
        and path not in earlier_format(folder)
    ]
    for old in (*whole[keep:], *given_up):
        if old.is_symlink():  # kept elsewhere
            old.unlink()
            continue
        (old / COMMIT).unlink(missing_ok=True)  # first, so that what is left by a death in between is not whole
        shutil.rmtree(old, ignore_errors=True)


def _steps(path: Path) -> int:
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else -1
