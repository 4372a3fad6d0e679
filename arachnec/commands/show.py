"""``arachnec show``: a program's cascades and its timelines, planned and, after a run, measured."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("show")
@click.argument("program", type=click.Path(path_type=Path))
@click.option("--svg", type=click.Path(path_type=Path), help="Draw the same timelines there.")
def command(program: Path, svg: Path | None) -> None:
    """Print the cascades and the timeline of PROGRAM, an executable folder or a lowered .cascade file.

    A folder that `arachnec run` has run also shows what was measured in its last step, on the same scale.
    """
    from arachnec.backends.timeline import planned, read_measured
    from arachnec.backends.timeline_svg import draw
    from arachnec.backends.timeline_terminal import gantt
    from arachnec.commands.program_file import MEASURED, read_program
    from arachnec.commands.tables import MOST_ROWS, cascade_table, terminal
    from arachnec.report import plan_report

    module = read_program(program)
    timelines = [planned(module)]
    measured = program / MEASURED
    if program.is_dir() and measured.is_file():
        timelines.append(read_measured(measured))
    console = terminal()
    rows = plan_report(module, 0.0)["cascades"]
    console.print(cascade_table(module, rows))
    if len(rows) > MOST_ROWS:
        console.print(f"  ... and {len(rows) - MOST_ROWS} more")
    end = max(timeline.end for timeline in timelines)
    for timeline in timelines:
        console.print(gantt(module, timeline, end=end, width=min(100, console.width)))
    if svg is not None:
        svg.write_text(draw(module, *timelines), encoding="utf-8")
        console.print(f"wrote {svg}")
