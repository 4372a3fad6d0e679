"""``arachnec opt``: IR in, passes, IR out."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import click

from arachnec.commands.options import PassOptions, pass_options
from arachnec.ir.diagnostic import UserError, text_too_large_error, user_error
from arachnec.ir.limits import LARGEST_MODULE
from arachnec.ir.parser import parse_module
from arachnec.ir.printer import print_module
from arachnec.passes.infra.instruments import pipeline_of


def unreadable_file_error(file: str, reason: str) -> UserError:
    return user_error(f"{file} cannot be read: {reason}", help="give a .cascade file")


def read_text(path: Path) -> str:
    """The text of a file, or of standard input where that is ``-``. Raises UserError."""
    if str(path) != "-" and path.exists() and not path.is_file():
        raise unreadable_file_error(str(path), "it is no file")
    try:
        with nullcontext(sys.stdin.buffer) if str(path) == "-" else path.open("rb") as file:
            data = file.read(LARGEST_MODULE + 1)
        if len(data) > LARGEST_MODULE:
            raise text_too_large_error(str(path), LARGEST_MODULE >> 20)
        return data.decode("utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise unreadable_file_error(str(path), str(reason)) from None


def wanted_passes(passes: str | None, text: str, file: str) -> str:
    """``--passes``, else what line 1 of the text names. Raises UserError where there is neither."""
    pipeline = passes if passes is not None else pipeline_of(text)
    if pipeline is None:
        raise user_error(
            f"no pipeline for {file}",
            help="give --passes, or write `// arachnec opt --passes ...` in the file's first line",
        )
    return pipeline


@click.command("opt")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--passes", metavar="PIPELINE", help="Passes, or the name of a pipeline; else line 1 of the file says.")
@click.option("-o", "--output", metavar="OUT", type=click.Path(path_type=Path), help="Write there, not to the screen.")
@pass_options
def command(file: Path, passes: str | None, output: Path | None, options: PassOptions) -> None:
    """Run passes over the module in FILE (`-` reads standard input) and print the result."""
    text = read_text(file)
    pipeline = options.pipeline(wanted_passes(passes, text, str(file)))
    name = "<stdin>" if str(file) == "-" else str(file)
    printed = print_module(pipeline.run(parse_module(text, name), options.instruments()))
    if output is None:
        click.echo(printed, nl=False)
    else:
        output.write_text(printed, encoding="utf-8")
