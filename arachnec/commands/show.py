"""``arachnec show``: a program's cascades and its timelines, planned and, after a run, measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from arachnec.ir.limits import TABLE_ROWS

if TYPE_CHECKING:
    from arachnec.ir.nodes import Module
    from arachnec.views.timeline import Timeline

FILE = click.Path(path_type=Path, dir_okay=False)


@click.command("show")
@click.argument("program", type=click.Path(path_type=Path))
@click.option("--all", "everything", is_flag=True, help="Print all cascades, not the longest 40 alone.")
@click.option("--html", type=FILE, help="Write the page to be opened in a browser there.")
@click.option("--svg", type=FILE, help="Draw the same timelines there.")
@click.option("--trace", type=FILE, help="Write a Chrome trace, for ui.perfetto.dev, there.")
def command(program: Path, everything: bool, html: Path | None, svg: Path | None, trace: Path | None) -> None:
    """Print the longest cascades and the timeline of PROGRAM, an executable folder or a lowered .cascade file.

    Of a folder that `arachnec run` has run, the plan of its last step is shown, and on the same scale what was measured
    in it; where that differs from the plan by more than a factor of two, a line says so.

    `timeline.html` in the folder, which `compile` and `run` write, is the same as a page: timelines to zoom in, memory,
    every cascade, and what bounds the makespan.
    """
    import json

    from arachnec.commands.generated import print_segments
    from arachnec.commands.tables import print_cascades, terminal
    from arachnec.ir.sampling import is_sampling
    from arachnec.report import plan_report
    from arachnec.views.chrome_trace import chrome_trace
    from arachnec.views.executable_page import PAGE
    from arachnec.views.planned_and_measured import differences, memory_words
    from arachnec.views.timeline import cascade_times, planned
    from arachnec.views.timeline_svg import draw
    from arachnec.views.timeline_terminal import gantt

    module, measured = read_run(program)
    timelines = [planned(module), *measured]
    console = terminal()
    rows = plan_report(module, 0.0)["cascades"]
    most, rest = None if everything else TABLE_ROWS, "`--all` prints them all"
    if is_sampling(module):
        print_segments(console, module, rows, rest, most)
    else:
        took = {name: longest for name, (_, _, longest) in cascade_times(measured[0]).items()} if measured else None
        print_cascades(console, module, rows, rest, most, took)
    end = max(timeline.end for timeline in timelines)
    for timeline in timelines:
        console.print(gantt(module, timeline, end=end, width=min(100, console.width)))
    for run in measured:
        for line in (*differences(module, timelines[0], run), *memory_words(module, run)):
            console.print(line, highlight=False, soft_wrap=True)
    if html is not None:
        html.write_text(page_of(program, module, measured), encoding="utf-8")
    if svg is not None:
        svg.write_text(draw(module, *timelines), encoding="utf-8")
    if trace is not None:
        trace.write_text(json.dumps(chrome_trace(module, *timelines)), encoding="utf-8")
    for path in filter(None, (html, svg, trace)):
        console.print(f"wrote {path}", highlight=False, soft_wrap=True)
    if html is None and (program / PAGE).is_file():
        console.print(f"as a page: {program / PAGE}", highlight=False, soft_wrap=True)


def read_run(program: Path) -> tuple[Module, list[Timeline]]:
    """The program, and the timeline that was measured where it is a folder that was run: then that step's program."""
    from arachnec.commands.program_file import read_program
    from arachnec.executable.folder import MEASURED, MEASURED_PROGRAM
    from arachnec.views.timeline import read_measured

    if not program.is_dir() or not (program / MEASURED).is_file():
        return read_program(program), []
    of_run = program / MEASURED_PROGRAM
    return read_program(of_run if of_run.is_file() else program), [read_measured(program / MEASURED)]


def page_of(program: Path, module: Module, measured: list[Timeline]) -> str:
    """The page; of an executable folder with its clips and versions."""
    from arachnec.executable.folder import HEADER, read_clips, read_header, samples
    from arachnec.executable.sampling_folder import read_sampling_executable
    from arachnec.views.executable_page import executable_page

    if not (program / HEADER).is_file():
        return executable_page(module, *measured)
    header: Any
    if samples(program):
        own = read_sampling_executable(program)
        header, clips = own.header, tuple(request.clip() for request in own.requests)
    else:
        header, clips = read_header(program), read_clips(program)
    return executable_page(module, *measured, pipeline=header.pipeline, clips=clips, libraries=header.versions)
