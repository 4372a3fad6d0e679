"""``arachnec bisect``: the first pass of a pipeline that goes wrong."""

from __future__ import annotations

from pathlib import Path

import click

from arachnec.commands.opt import read_text, wanted_passes
from arachnec.commands.options import load_option, registry_with
from arachnec.ir.parser import parse_module
from arachnec.passes.infra.bisect import command_predicate, first_bad
from arachnec.passes.infra.instruments import write_reproducer
from arachnec.passes.infra.pipeline import Pipeline, pass_text


@click.command("bisect")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--passes", metavar="PIPELINE", help="Passes, or the name of a pipeline; else line 1 of the file says.")
@click.option("--predicate", metavar="CMD", help="Gets the path of a module's text; exit code 0 says it is good.")
@load_option
def command(file: Path, passes: str | None, predicate: str | None, load: tuple[Path, ...]) -> int:
    """Find the first pass after which the module in FILE is bad.

    Bad is a pass that crashes and a module that does not verify; with --predicate, a module it refuses. Exit code 0:
    it is good after all passes. 1: one is bad; what it was given is written to a file.
    """
    registry = registry_with(load)
    text = read_text(file)
    pipeline = Pipeline.parse(wanted_passes(passes, text, str(file)), registry)
    module = parse_module(text, str(file))
    verdict = first_bad(module, pipeline, command_predicate(predicate)) if predicate else first_bad(module, pipeline)
    if verdict.index is None:
        click.echo(f"good after all {len(pipeline.passes)} passes")
        return 0
    if verdict.index < 0:
        click.echo(verdict.reason)
        return 1
    step = pipeline.passes[verdict.index]
    path = Path(f"bisect_{step.name.replace('-', '_')}.cascade")
    write_reproducer(path, verdict.before, pass_text(step))
    click.echo(f"first bad pass: {pass_text(step)} (number {verdict.index + 1} of {len(pipeline.passes)})")
    click.echo(f"  {verdict.reason}")
    click.echo(f"  `arachnec opt {path}` repeats it")
    return 1
