"""Options of sampler files, and which of the two kinds of file a command was given."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

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
    """Whether a file has the form of a sampler file: it defines `models`. Reads it, and runs nothing."""
    try:
        nodes = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return False  # whoever loads it says what is wrong
    assigned = (node.targets for node in nodes if isinstance(node, ast.Assign))
    leaves = (leaf for targets in assigned for target in targets for leaf in ast.walk(target))
    names = {leaf.id for leaf in leaves if isinstance(leaf, ast.Name)}
    return "models" in names | {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
