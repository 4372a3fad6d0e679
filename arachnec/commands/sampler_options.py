"""Options of sampler files, and which of the two kinds of file a command was given."""

from __future__ import annotations

import ast
import functools
import symtable
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from arachnec.ir.diagnostic import user_error

Command = TypeVar("Command", bound=Callable[..., Any])
OF_TRAINING = "of training; a sampler file has none of it"


def sampler_options(command: Command) -> Command:
    """Give a click command ``switch``, ``first`` and ``history``."""
    rules = "fixed=K, boundary=R, adaptive=X[,least=N][,most=N]"
    return functools.reduce(
        lambda inner, option: option(inner),
        (
            click.option(
                "--history",
                type=click.Choice(["carry", "restart"]),
                help="Of a sampler file: what a scheduler with memory does at the switch; default: carry.",
            ),
            click.option("--first", help="Of a sampler file: the model of the first steps; default: its first."),
            click.option("--switch", help=f"Of a sampler file: when the second model takes over: {rules}."),
        ),
        command,
    )


def refuse(given: Mapping[str, object], why: str) -> None:
    """Raises ``UsageError`` for the first of these options that is there."""
    for name, value in given.items():
        if value not in (None, False):
            raise click.UsageError(f"{name} is {why}")


def is_sampler(path: Path) -> bool:
    """Whether a file is a sampler file: it names `models`, and not all of `build`, `sample` and `loss`. Reads it, and
    runs nothing. Raises ``UserError`` for one that names all functions of both kinds."""
    from arachnec.models.file import MODEL_FILE, SAMPLER_FORM, definition

    names = _top_level_names(path, set())
    trains, samples = names.issuperset(MODEL_FILE.required), names.issuperset(SAMPLER_FORM.required)
    if trains and samples:
        raise user_error(
            "this is a model file and a sampler file in one",
            label=f"it names build, sample and loss, and {', '.join(SAMPLER_FORM.required)} too",
            help="move what samples into a file of its own, which imports this one; or give `models` another name",
            span=definition(path, "models"),
        )
    return samples or ("models" in names and "build" not in names)


def _top_level_names(path: Path, seen: set[Path]) -> set[str]:
    """What a file assigns, defines or imports outside of functions; of `from x import *` what the file beside it does.

    Of a file that cannot be read none: loading it says what is wrong.
    """
    seen.add(path)
    try:
        source = path.read_bytes()
        symbols = symtable.symtable(source.decode(), str(path), "exec").get_symbols()
        nodes = ast.parse(source).body
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    names = {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}
    starred = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.names[0].name == "*" and node.module]
    files = {path.parent.joinpath(*str(node.module).split(".")).with_suffix(".py") for node in starred} - seen
    return names.union(*(_top_level_names(file, seen) for file in files))
