"""``arachnec``: one group whose commands are imported only when they are called, so that ``--help`` answers at once."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence

import click

from arachnec.commands.groups import SuggestingGroup
from arachnec.launch.environment import leave_gpus_to_ranks
from arachnec.launch.start_times import note_launch
from arachnec.version import __version__

COMMANDS = {
    "compile": "Trace a model, plan its training on these clips, write the executable.",
    "run": "Train with an executable, on this machine or under torchrun.",
    "generate": "Sample videos for requests, with one model or two.",
    "export": "Write a checkpoint's model as a folder that Diffusers loads.",
    "cache": "Run a model's encoders beforehand, restartable; write what they gave and its manifest.",
    "manifest": "List a folder of videos as clips, with their sizes and captions.",
    "compare": "Plan the same clips with several pipelines; one table.",
    "opt": "IR in, passes, IR out.",
    "plan": "Schedule cascades whose durations somebody measured.",
    "cluster": "Describe a machine as a cluster file.",
    "profile": "Measure a model's stages on this machine.",
    "simulate": "Run a lowered program through the simulator.",
    "show": "Print a plan's cascades and timeline; a page, a drawing, a trace.",
    "explain": "Say why a plan is as it is, and what would make it faster.",
    "check": "Prove a program free of deadlock, lost clips and lack of memory.",
    "passes": "List the passes and the named pipelines.",
    "convert-checkpoint": "Rewrite a checkpoint that an earlier version wrote.",
    "bisect": "Find the first pass of a pipeline that goes wrong.",
}


class LazyGroup(SuggestingGroup):
    """Finds ``arachnec.commands.NAME:command``; the help texts of the list stand in ``COMMANDS``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"arachnec.commands.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, prog_name="arachnec")
def group() -> None:
    """A compiler for training video diffusion transformers on clips of mixed resolution and duration."""


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code: 2 for a user's mistake, 130 when interrupted.

    So is a file or folder that the system refuses. A bug of the compiler is not caught.
    """
    from arachnec.ir.diagnostic import UserError, refused, render, render_all

    try:
        result = group.main(args=arguments, prog_name="arachnec", standalone_mode=False)
    except UserError as error:
        click.echo(render_all(error.diagnostics), err=True)
        return 2
    except click.NoSuchOption as error:
        nearest = difflib.get_close_matches(error.option_name, error.possibilities or (), 1)
        click.NoSuchOption(error.option_name, possibilities=nearest, ctx=error.ctx).show()
        return error.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except OSError as error:
        diagnostic = refused(error)
        if diagnostic is None:
            raise
        click.echo(render(diagnostic), err=True)
        return 2
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return 130
    return result if isinstance(result, int) else 0


def main() -> None:
    leave_gpus_to_ranks(os.environ)
    note_launch(os.environ)
    try:
        code = run()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as `head`, has left: nobody is there to be told
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    sys.exit(code)


if __name__ == "__main__":
    main()
