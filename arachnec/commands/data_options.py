"""The options that say which clips a command reads: ``--data``, ``--columns``, and ``--batch``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

import click

from arachnec.data.columns import Columns
from arachnec.data.manifest import ALL, Batch

F = TypeVar("F", bound=Callable[..., Any])


class BatchType(click.ParamType):  # type: ignore[type-arg]
    """A number of clips, or ``all``."""

    name = "N|all"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | Literal["all"]:
        if str(value).lower() == ALL:
            return ALL
        try:
            number: int = click.IntRange(min=1).convert(value, param, ctx)
        except click.BadParameter:
            self.fail(f"{value!r} is neither a number of clips, from 1 on, nor `{ALL}`", param, ctx)
        return number


def columns_of(context: click.Context, parameter: click.Parameter, text: str) -> str:
    """The text itself. Raises ``UserError`` where it names no columns."""
    Columns.of(text)
    return text


def data_option(*, required: bool = True, more: str = "") -> Callable[[F], F]:
    return click.option(
        "--data",
        required=required,
        type=click.Path(path_type=Path),
        help=f"The clips: JSONL, JSON, CSV or Parquet{more}.",
    )


columns_option = click.option(
    "--columns",
    default="",
    metavar="KEY=COLUMN,...",
    callback=columns_of,
    help="What its columns are, as in caption=prompt,path=video; values=NAME or values=* goes to clip.values.",
)
batch_option = click.option(
    "--batch", type=BatchType(), help="Clips in a global batch, or `all`, where the manifest does not say."
)

__all__ = ["Batch", "batch_option", "columns_option", "data_option"]
