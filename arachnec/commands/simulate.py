"""``arachnec simulate``: what a program would take, by discrete events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from arachnec.backends.simulator import Simulation
    from arachnec.ir.nodes import Module


@click.command("simulate")
@click.argument("program", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
@click.option("--trace", type=click.Path(path_type=Path), help="Write a Chrome trace, for ui.perfetto.dev, there.")
@click.option("--svg", type=click.Path(path_type=Path), help="Draw planned and simulated timelines there.")
def command(program: Path, as_json: bool, trace: Path | None, svg: Path | None) -> None:
    """Check PROGRAM, an executable folder or a lowered .cascade file, and run it through the simulator."""
    from arachnec.backends.simulator import simulate
    from arachnec.commands.program_file import read_program
    from arachnec.passes.check import checked
    from arachnec.report import simulation_report
    from arachnec.views.chrome_trace import chrome_trace
    from arachnec.views.timeline import planned
    from arachnec.views.timeline_svg import draw

    module = checked(read_program(program))
    simulation = simulate(module)
    timelines = (planned(module), simulation.timeline)
    if trace is not None:
        trace.write_text(json.dumps(chrome_trace(module, *timelines)), encoding="utf-8")
    if svg is not None:
        svg.write_text(draw(module, *timelines), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(simulation_report(module, simulation), indent=2))
        return
    _print(module, simulation)
    for path in filter(None, (trace, svg)):
        click.echo(f"wrote {path}")


def _print(module: Module, simulation: Simulation) -> None:
    from arachnec.commands.tables import bold, ms, terminal
    from arachnec.ir.nodes import quantity
    from arachnec.ir.sampling import is_sampling
    from arachnec.views.timeline_terminal import gantt

    console = terminal()
    console.print(gantt(module, simulation.timeline, width=min(100, console.width)))
    plan = quantity(module.attrs["makespan"])
    mfu = f", MFU {simulation.mfu:.1%}" if simulation.mfu is not None else ""
    iteration = "" if is_sampling(module) else f" iteration {ms(simulation.iteration_ms)},"
    console.print(
        "\n",
        bold("simulated"),
        f"{iteration} makespan {ms(simulation.makespan_ms)} "
        f"(planned {ms(plan)})\n  imbalance {simulation.imbalance:.1%}, "
        f"peak memory {max(simulation.peak_memory_gib, default=0.0):.3g} GiB{mfu}",
        highlight=False,
        sep="",
    )
