"""The options that ``arachnec run`` and a worker share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from arachnec.executable.train_file import located, training_of
from arachnec.executable.training_options import Training
from arachnec.ir.diagnostic import UserError
from arachnec.launch.phases import Timeouts

F = TypeVar("F", bound=Callable[..., Any])

FILE = click.Path(path_type=Path, dir_okay=False, writable=True)
FOLDER = click.Path(path_type=Path, file_okay=False, writable=True)
READ = click.Path(path_type=Path)
PRETRAINED = click.Path(path_type=Path)
GIVEN = ("checkpoint", "save_gradients", "save_lists", "replay_lists", "init")  # paths that all ranks have, or none
SHARED = ("steps", "epochs", "more", "every", "keep", "resume", "max_skipped")
ENDS = ("steps", "epochs", "more")  # of which one says where a run ends
FLAGS = ("lr", "clip_norm", "dtype", "ema", "seed")  # training options with an option of their own
TRAINING = (
    click.option("--train", type=READ, help="Training options, a TOML file: docs/training_options.md."),
    click.option("--set", "settings", metavar="KEY=VALUE", multiple=True, help="One training option, as in that file."),
    click.option("--lr", type=float, help="Learning rate of the optimizer."),
    click.option("--clip-norm", type=float, help="Largest norm of the whole gradient; 0 for no limit."),
    click.option("--dtype", type=click.Choice(["fp32", "bf16"]), help="Precision; bf16 keeps fp32 master weights."),
    click.option("--ema", type=float, help="Decay of an average of the weights, such as 0.999."),
    click.option("--seed", type=int, help="Of weights, noise and timesteps."),
)
OPTIONS = (
    click.option(
        "--steps",
        type=click.IntRange(min=1),
        help="Optimizer steps in all, with those before a resumed run; default: one pass over the manifest.",
    ),
    click.option("--epochs", type=click.IntRange(min=1), help="Passes over the manifest in all, instead of --steps."),
    click.option("--more", type=click.IntRange(min=1), help="Optimizer steps beyond those of the checkpoint, instead."),
    click.option("--save-gradients", type=FILE, help="Write the last step's gradient here."),
    click.option("--save-lists", type=FOLDER, help="Write the lists of key blocks of every step here."),
    click.option("--replay-lists", type=READ, help="Attend to the key blocks that were saved here, step by step."),
    click.option("--report", type=FILE, help="Write what was measured here, as JSON."),
    click.option("--init", type=PRETRAINED, help="Begin with the weights in this folder: Diffusers', or safetensors."),
    click.option("--checkpoint", type=FOLDER, help="Keep checkpoints in this folder."),
    click.option(
        "--every", type=click.IntRange(min=1), help="Steps between checkpoints; default: only after the last."
    ),
    click.option("--keep", type=click.IntRange(min=1), default=2, show_default=True, help="Checkpoints that stay."),
    click.option("--resume", is_flag=True, help="Continue from the newest whole checkpoint; without one begin at 0."),
    *TRAINING,
    click.option(
        "--max-skipped",
        type=click.IntRange(min=1),
        default=5,
        show_default=True,
        help="Steps in a row, skipped because a gradient is not finite, that end the run.",
    ),
    *(
        click.option(f"--{phase}-timeout", type=click.FloatRange(min=0, min_open=True), help=f"Seconds {what}.")
        for phase, what in (
            ("start", "that reading weights, a checkpoint or compiling may take; default: from the plan's bytes"),
            ("plan", "that a step may wait for its plan; default: from what planning took when it was compiled"),
            ("step", "that a step may take; default: ten times the planned or the slowest step, at least 60"),
            ("stall", "beyond its planned time that an instruction may take which waits for no other; default: 60"),
        )
    ),
)


@dataclass(frozen=True)
class RunOptions:
    """How far to run, and what to write."""

    steps: int | None = None
    epochs: int | None = None
    more: int | None = None
    save_gradients: Path | None = None
    save_lists: Path | None = None
    replay_lists: Path | None = None
    report: Path | None = None
    init: Path | None = None
    checkpoint: Path | None = None
    every: int | None = None
    keep: int = 2
    resume: bool = False
    train: Path | None = None
    settings: tuple[str, ...] = ()
    lr: float | None = None
    clip_norm: float | None = None
    dtype: str | None = None
    ema: float | None = None
    seed: int | None = None
    start_timeout: float | None = None
    plan_timeout: float | None = None
    step_timeout: float | None = None
    stall_timeout: float | None = None
    max_skipped: int = 5

    def shared(self) -> dict[str, object]:
        """What all ranks must be given alike, so that none takes a step, or writes, without the others. By what a
        person calls it."""
        values = {name: getattr(self, name) for name in SHARED}
        given = {name: getattr(self, name) is not None for name in GIVEN}
        return {f"the option --{name.replace('_', '-')}": value for name, value in (values | given).items()}

    def timeouts(self) -> Timeouts:
        return Timeouts(self.start_timeout, self.plan_timeout, self.step_timeout, self.stall_timeout)

    def training(self, compiled: Training) -> Training:
        """The executable's options, with those given here in their place. Raises ``UserError`` for one out of range."""
        given = {name: getattr(self, name) for name in FLAGS}
        flags = {name: value for name, value in given.items() if value is not None}
        return training_of(compiled, self.train, self.settings, flags)

    def arguments(self) -> list[str]:
        """These options as a worker's command line."""
        words: list[str] = []
        for name, given in self.__dataclass_fields__.items():
            value = getattr(self, name)
            if value == given.default:
                continue
            flag = "--" + name.replace("_", "-")
            if name == "settings":
                words += [word for text in value for word in ("--set", text)]
            elif value is True:
                words.append(flag)
            else:
                words += [flag, str(value)]
        return words


def training_options(function: F) -> F:
    """Give a click command the training options of ``RunOptions``, as the one argument ``training``."""

    @functools.wraps(function)
    def wrapped(**given: Any) -> Any:
        own = RunOptions(**{name: given.pop(name) for name in ("train", "settings", *FLAGS)})
        try:
            return function(training=own.training(Training()), **given)
        except UserError as error:
            raise located(error, own.train) from None

    for option in reversed(TRAINING):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[return-value]


def run_options(function: F) -> F:
    """Give a click command every option of ``RunOptions``, as the one argument ``options``."""

    @functools.wraps(function)
    def wrapped(**given: Any) -> Any:
        own = {name: given.pop(name) for name in RunOptions.__dataclass_fields__}
        options = RunOptions(**own)
        if len(ends := [f"--{name}" for name in ENDS if getattr(options, name) is not None]) > 1:
            raise click.UsageError(f"{ends[0]} and {ends[1]} both say where the run ends: give one of them")
        if options.resume and options.checkpoint is None:
            raise click.UsageError("--resume needs the folder of the checkpoints: add --checkpoint DIR")
        if options.every is not None and options.checkpoint is None:
            raise click.UsageError("--every needs the folder of the checkpoints: add --checkpoint DIR")
        return function(options=options, **given)

    for option in reversed(OPTIONS):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[return-value]
