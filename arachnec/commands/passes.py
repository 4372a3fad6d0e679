"""``arachnec passes``: what passes there are, and the named pipelines."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path

import click

from arachnec.commands.options import load_option, registry_with
from arachnec.ir.nodes import Level
from arachnec.passes.infra import options
from arachnec.passes.infra.base import Pass, Registry, Scope
from arachnec.passes.infra.named_pipelines import NAMED


@click.command("passes")
@load_option
def command(load: tuple[Path, ...]) -> None:
    """List the passes (the level each needs and gives, how often it runs, its options) and the named pipelines."""
    registry = registry_with(load)
    click.echo("\n".join(_passes(registry)))
    click.echo("\nNamed pipelines")
    width = max(map(len, NAMED))
    for name, text in NAMED.items():
        click.echo(f"  {name:<{width}}  {text}")


def _passes(registry: Registry) -> Iterator[str]:
    yield "Passes"
    kinds = {name: registry.get(name) for name in registry}
    for name, kind in sorted(kinds.items(), key=_turn):
        levels = kind.needs.word if kind.gives <= kind.needs else f"{kind.needs.word} -> {kind.gives.word}"
        yield f"  {name}  ({levels}, once per {kind.scope.value})"
        yield f"      {(inspect.getdoc(kind) or '').partition(chr(10))[0]}"
        yield from _options(kind)


def _turn(item: tuple[str, type[Pass]]) -> tuple[bool, Level, Level, str]:
    """About where in a pipeline it stands."""
    name, kind = item
    return kind.scope is Scope.ITERATION, kind.needs, kind.gives, name


def _options(kind: type[Pass]) -> Iterator[str]:
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name, value_type in options.option_types(kind).items():
        default = fields[name].default
        shown = "" if default is dataclasses.MISSING else f", default {options.write(value_type, default) or '``'}"
        yield f"      {name} = {options.describe(value_type)}{shown}"
