"""``arachnec explain``: why a plan is as it is, and what would make it faster."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

import click

from arachnec.commands.options import load_option, registry_with

if TYPE_CHECKING:
    from arachnec.ir.nodes import Module
    from arachnec.views.what_if import Answer

WITHOUT_FOLDER = "schedule-z3,place,bucket,lower,check"  # where no folder says what the plan was made by
OF_REQUESTS = "schedule-sampling,place,lower,check"


@click.command("explain")
@click.argument("program", type=click.Path(path_type=Path))
@click.option("--budget", default="500ms", show_default=True, help="For each plan that answers what would change it.")
@click.option("--what-if/--no-what-if", default=True, help="Whether to plan what would change it.")
@load_option
def command(program: Path, budget: str, what_if: bool, load: tuple[Path, ...]) -> None:
    """Say in sentences why the plan of PROGRAM, an executable folder or a lowered .cascade file, is as it is.

    What bounds it, the critical path by name, why long cascades have their degrees, what recomputes, where ranks
    idle; and what one more node, other degrees, more memory or encoders out of the way would make of it, each planned
    anew. Where the plan was made by passes of a Python file, --load that file to have these answers.
    """
    from arachnec.commands.program_file import read_program
    from arachnec.commands.tables import bold, terminal
    from arachnec.passes.check import checked
    from arachnec.passes.infra.base import Duration
    from arachnec.passes.infra.options import BadOption, read
    from arachnec.views.explain import Section, explain
    from arachnec.views.what_if import sentences

    try:
        milliseconds = float(read(Duration, budget))
    except BadOption as error:
        raise click.BadParameter(str(error), param_hint="--budget") from None
    module = checked(read_program(program))
    sections = explain(module)
    if what_if:
        unloaded = left_out(program, load)
        told = unloaded or sentences(answers(program, module, milliseconds, load))
        sections += (Section("What would change it", tuple(told)),)
    console = terminal()
    for section in sections:
        console.print("\n", bold(section.title), sep="")
        for sentence in section.sentences:
            console.print(f"  {sentence}", highlight=False, soft_wrap=True)


def left_out(program: Path, load: tuple[Path, ...]) -> list[str]:
    """Why nothing is planned anew: passes of the executable's own are code, and looking at a plan runs none."""
    from arachnec.executable.folder import HEADER, read_header, samples
    from arachnec.executable.sampling_folder import read_sampling_header

    read = read_sampling_header if samples(program) else read_header
    own = read(program).load if (program / HEADER).is_file() else ()
    missing = [name for name in own if name not in {path.name for path in load}]
    options = " ".join(f"--load {program / name}" for name in missing)
    return [f"The plan was made by passes in {', '.join(missing)}: give {options} to run them."] if missing else []


def answers(program: Path, module: Module, budget_ms: float, load: tuple[Path, ...] = ()) -> tuple[Answer, ...]:
    """By the pipeline of the executable folder, from its traced clips on; of a file, from its cascades on."""
    from arachnec.executable.folder import HEADER, read_executable, samples
    from arachnec.executable.sampling_folder import read_sampling_executable
    from arachnec.ir.sampling import is_sampling
    from arachnec.passes.infra.pipeline import Pipeline
    from arachnec.views.what_if import begin_of, what_if

    if not (program / HEADER).is_file():
        begin = begin_of(module)
        passes = OF_REQUESTS if is_sampling(module) else WITHOUT_FOLDER
        return what_if(begin, begin, Pipeline.parse(passes), module, budget_ms)
    registry = registry_with(load)
    if samples(program):
        own = read_sampling_executable(program)
        with contextlib.chdir(program):
            pipeline = Pipeline.parse(own.header.pipeline, registry)
            return what_if(own.traced, own.traced, pipeline, module, budget_ms)
    executable = read_executable(program)
    with contextlib.chdir(program):  # where the pipeline finds its profile
        pipeline = Pipeline.parse(executable.header.pipeline, registry)
        return what_if(executable.traced, executable.model, pipeline, module, budget_ms)
