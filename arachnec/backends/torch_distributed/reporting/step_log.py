"""Every step told to who wants to know: a file of JSON lines, TensorBoard, Weights & Biases, the model file's
``on_step``.

Rank 0 tells, behind each step. A file that is there is continued: a resumed run's lines stand behind the others.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from arachnec.backends.torch_distributed.reporting.report import StepReport
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
