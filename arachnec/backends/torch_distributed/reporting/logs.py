"""What a run writes line by line: every step, told to who wants to know, and what became of every clip.

Rank 0 tells, behind each step. A file that is there is continued: a resumed run's lines stand behind the others.

Always true: in the audit each batch of a step that counts has one line. A run that goes on from a checkpoint drops the
lines of steps that were lost, and writes them anew. So the lines of an epoch name every clip of the manifest once.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from arachnec.backends.torch_distributed.reporting.report import ClipNote, StepReport
from arachnec.executable.folder import demand_folder
from arachnec.executable.training_options import Logging, Training
from arachnec.ir.diagnostic import user_error, writing

Told = Callable[[int, Mapping[str, float]], None]
TAIL = 2**16  # bytes: more than a line has
NO_METRICS = ("step", "iteration", "event")


@dataclass
class StepLog:
    """``told`` are called with each step and its metrics, ``ends`` when the run is over."""

    told: list[Told] = field(default_factory=list)
    ends: list[Callable[[], object]] = field(default_factory=list)

    @classmethod
    def open(cls, training: Training, on_step: Told | None, rank: int) -> StepLog:
        """Nothing but on rank 0. Raises ``UserError`` for a package that is absent, OSError for a place that is
        refused."""
        log = cls()
        if rank != 0:
            return log
        logging = training.logging
        if logging.jsonl is not None:
            log._add_lines(Path(logging.jsonl))
        if logging.tensorboard is not None:
            log._add_tensorboard(logging.tensorboard)
        if logging.wandb is not None:
            log._add_wandb(logging, msgspec.to_builtins(training))
        if on_step is not None:
            log.told.append(on_step)
        return log

    def tell(self, report: StepReport) -> None:
        metrics = metrics_of(report)
        for told in self.told:
            told(report.step, metrics)

    def close(self) -> None:
        for end in self.ends:
            end()

    def _add_lines(self, path: Path) -> None:
        demand_folder(path.parent)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file():
            _end_with_a_line(path)
        stream = path.open("ab")

        def write(step: int, metrics: Mapping[str, float]) -> None:
            with writing(path):
                stream.write(msgspec.json.encode({"step": step, **metrics}) + b"\n")
                stream.flush()

        def close() -> None:
            with writing(path):
                stream.close()

        self.told.append(write)
        self.ends.append(close)

    def _add_tensorboard(self, folder: str) -> None:
        writer = _package("torch.utils.tensorboard", "tensorboard", "tensorboard").SummaryWriter(folder)

        def write(step: int, metrics: Mapping[str, float]) -> None:
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)

        self.told.append(write)
        self.ends.append(writer.close)

    def _add_wandb(self, logging: Logging, options: Mapping[str, Any]) -> None:
        run = _package("wandb", "wandb", "wandb").init(project=logging.wandb, config=options)
        self.told.append(lambda step, metrics: run.log(dict(metrics), step=step))
        self.ends.append(run.finish)


def _end_with_a_line(path: Path) -> None:
    """Take off what a full disk or a lost host left of a last line: the next one would be joined to it."""
    with path.open("r+b") as file:
        start = max(0, file.seek(0, os.SEEK_END) - TAIL)
        file.seek(start)
        end = file.read().rfind(b"\n")
        if end >= 0 or not start:  # else it is no log of lines
            file.truncate(start + end + 1)


def metrics_of(report: StepReport) -> dict[str, float]:
    """The numbers of a step, by name; without those that it has not."""
    values = msgspec.to_builtins(report)
    return {k: float(v) for k, v in values.items() if k not in NO_METRICS and isinstance(v, int | float)}


def _package(module: str, package: str, key: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise user_error(
            f"`logging.{key}` needs the package `{package}`, which is not installed",
            help=f"pip install {package}, or leave the key out",
        ) from None


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
        self._add(self._file(line.step), line)

    def add_validation(self, line: ValidationLine) -> None:
        """The loss behind a step that was added."""
        self._add(self._folder / VALIDATION, line)

    def _add(self, path: Path, line: AuditLine | ValidationLine) -> None:
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
