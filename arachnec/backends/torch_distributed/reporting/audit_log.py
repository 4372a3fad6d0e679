"""What became of every clip: ``audit/epoch-00000.jsonl``, a line for each global batch, one file an epoch.

Always true: of the batches of steps that count, each has one line. A run that goes on from a checkpoint drops the
lines of steps that were lost, and writes them anew. So the lines of an epoch name every clip of the manifest once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from arachnec.backends.torch_distributed.reporting.report import ClipNote
from arachnec.ir.diagnostic import user_error, writing

FOLDER = "audit"
VALIDATION = "validation.jsonl"  # beside the epochs: a line for each time that the run was validated
Line = TypeVar("Line")
STEPS_OF_A_FILE = 1000  # where batches come from outside, and there are no epochs


class AuditLine(msgspec.Struct, frozen=True):
    """A step. ``trained`` took part in it, ``set_aside`` could not be used; where the step was ``skipped`` its clips
    were seen, and changed nothing. ``loss`` is that of the optimizer step, on each of its batches' lines."""

    step: int
    trained: list[str | int]
    skipped: bool = False
    not_finite: list[ClipNote] = []
    set_aside: list[ClipNote] = []
    loss: float | None = None


class ValidationLine(msgspec.Struct, frozen=True):
    """The loss of the validation manifest behind a step; None where it is not finite."""

    step: int
    loss: float | None


class AuditLog:
    """The log of one run, in the folder of its checkpoints or else of its executable; one rank writes it.

    ``epoch_of`` a global batch says which file its line is in; ``done`` is the number of batches that count so far.
    """

    def __init__(self, folder: Path, epoch_of: Callable[[int], int], done: int) -> None:
        self._folder = folder / FOLDER
        self._epoch_of = epoch_of
        self._folder.mkdir(parents=True, exist_ok=True)
        for file in self._folder.glob("epoch-*.jsonl"):
            _keep(file, [line for line in lines_of(file) if line.step < done] if done else [])
        if (validated := self._folder / VALIDATION).is_file():
            _keep(validated, [line for line in _decoded(validated, ValidationLine) if line.step < done])

    def add(self, line: AuditLine) -> None:
        """One more step. It is with the system, not yet on the disk, when this returns."""
        path = self._file(line.step)
        with writing(path), path.open("ab") as file:
            file.write(_encoded(line))

    def add_validation(self, line: ValidationLine) -> None:
        """The loss behind a step that was added."""
        path = self._folder / VALIDATION
        with writing(path), path.open("ab") as file:
            file.write(_encoded(line))

    def sync(self, step: int) -> None:
        """Have on the disk all up to ``step``, which a checkpoint is about to count as done."""
        file = self._file(step)
        if file.exists():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())

    def _file(self, step: int) -> Path:
        return self._folder / f"epoch-{self._epoch_of(step):05d}.jsonl"


def losses(folder: Path, batches: int) -> dict[int, float]:
    """The loss of every optimizer step that counts, from the log in ``folder``; a step has so many ``batches``."""
    files = sorted((folder / FOLDER).glob("epoch-*.jsonl"))
    lines = (line for file in files for line in lines_of(file))
    return {line.step // batches: line.loss for line in lines if line.loss is not None}


def validation_losses(folder: Path, batches: int) -> dict[int, float]:
    """The validation loss behind every optimizer step that counts and has one, as ``losses``."""
    file = folder / FOLDER / VALIDATION
    lines = _decoded(file, ValidationLine) if file.is_file() else ()
    return {line.step // batches: line.loss for line in lines if line.loss is not None}


def lines_of(file: Path) -> Iterator[AuditLine]:
    """The lines of one epoch. Raises ``UserError`` for a damaged one."""
    return _decoded(file, AuditLine)


def _decoded(file: Path, kind: type[Line]) -> Iterator[Line]:
    """The lines of a file. A last one that was not written to its end, because the host died, is none.

    Raises ``UserError`` for a damaged one."""
    for number, text in enumerate(file.read_bytes().splitlines(keepends=True), 1):
        if not text.endswith(b"\n"):
            return
        try:
            yield msgspec.json.decode(text, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise user_error(
                f"line {number} of the audit log {file} cannot be read: {error}",
                help="restore that file, or move it away: the log then names no clips of the steps in it",
            ) from None


def _keep(file: Path, lines: Sequence[AuditLine | ValidationLine]) -> None:
    """Have a file hold these lines; none is no file."""
    if not lines:
        file.unlink()
        return
    draft = file.with_suffix(".draft")
    with writing(draft):
        draft.write_bytes(b"".join(map(_encoded, lines)))
    draft.rename(file)


def _encoded(line: AuditLine | ValidationLine) -> bytes:
    return msgspec.json.encode(line) + b"\n"
