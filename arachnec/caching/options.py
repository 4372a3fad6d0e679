"""The options of encoding a manifest, by ``arachnec cache`` and under torchrun."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from arachnec.launch.phases import Timeouts

Command = TypeVar("Command", bound=Callable[..., Any])
PATH = click.Path(path_type=Path)
FOLDER = click.Path(path_type=Path, file_okay=False, writable=True)


@dataclass(frozen=True)
class CacheOptions:
    model: Path
    data: Path
    output: Path
    encoders: str  # names, with commas between; all where empty
    init: Path | None
    seed: int
    batch: int | None  # clips planned together
    as_json: bool
    columns: str = ""
    start_timeout: float | None = None
    plan_timeout: float | None = None
    stall_timeout: float | None = None

    @property
    def timeouts(self) -> Timeouts:
        return Timeouts(self.start_timeout, self.plan_timeout, stall=self.stall_timeout)


OPTIONS = (
    click.argument("model", type=PATH),
    click.option("--data", required=True, type=PATH, help="The clips: JSONL, JSON, CSV or Parquet."),
    click.option("--columns", default="", metavar="KEY=COLUMN,...", help="What its columns are: caption=prompt,..."),
    click.option(
        "-o",
        "--output",
        required=True,
        type=FOLDER,
        help="Write the encoders' output and its manifest into this folder.",
    ),
    click.option("--encoders", default="", help="Names, with commas between; default: all of the model file."),
    click.option("--init", type=PATH, help="Read the encoders' weights from this folder: Diffusers'."),
    click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of weights without --init."),
    click.option("--batch", type=click.IntRange(min=1), help="Clips planned together; default: 16 a rank."),
    click.option("--json", "as_json", is_flag=True, help="Print what was done as JSON."),
    *(
        click.option(f"--{phase}-timeout", type=click.FloatRange(min=0, min_open=True), help=f"Seconds {what}.")
        for phase, what in (
            ("start", "that reading the encoders' weights may take; default: 600"),
            ("plan", "that a batch may wait for its plan; default: 600"),
            ("stall", "beyond its planned time that an instruction may take which waits for no other; default: 60"),
        )
    ),
)


def cache_options(command: Command) -> Command:
    """Give a click command every option of ``CacheOptions``, as the one argument ``options``."""

    @functools.wraps(command)
    def wrapped(**given: Any) -> Any:
        own = {name: given.pop(name) for name in CacheOptions.__dataclass_fields__}
        return command(options=CacheOptions(**own), **given)

    for option in reversed(OPTIONS):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[return-value]
