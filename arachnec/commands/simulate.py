"""``arachnec simulate``: what a program would take, by discrete events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    from arachnec.backends.timeline import chrome_trace, planned
    from arachnec.backends.timeline_svg import draw
    from arachnec.commands.program_file import read_program
    from arachnec.passes.check import checked

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


def simulation_report(module: Module, simulation: Simulation) -> dict[str, Any]:
    """The keys of every report, with what the simulation came to in the place of the plan's sums."""
    from arachnec.report import plan_report

    report = plan_report(module, 0.0)
    spans: dict[str, tuple[float, float]] = {}
    for interval in simulation.timeline.intervals:
        start, end = spans.get(interval.target, (interval.start, interval.end))
        spans[interval.target] = (min(start, interval.start), max(end, interval.end))
    for row in report["cascades"]:
        row["start_ms"], row["end_ms"] = spans[row["name"]]
    return report | {
        "makespan_ms": simulation.makespan_ms,
        "iteration_ms": simulation.iteration_ms,
        "gap": simulation.makespan_ms / report["bound_ms"] - 1 if report["bound_ms"] > 0 else 0.0,
        "imbalance": simulation.imbalance,
        "peak_memory_gib": max(simulation.peak_memory_gib, default=0.0),
        "mfu": simulation.mfu,
        "ranks": [
            {"rank": program.rank, "busy_ms": busy, "idle_ms": idle, "peak_memory_gib": memory}
            for program, busy, idle, memory in zip(
                module.programs, simulation.busy_ms, simulation.idle_ms, simulation.peak_memory_gib, strict=True
            )
        ],
    }


def _print(module: Module, simulation: Simulation) -> None:
    from arachnec.backends.timeline_terminal import gantt
    from arachnec.commands.tables import ms, terminal
    from arachnec.ir.nodes import quantity

    console = terminal()
    console.print(gantt(module, simulation.timeline, width=min(100, console.width)))
    plan = quantity(module.attrs["makespan"])
    mfu = f", MFU {simulation.mfu:.1%}" if simulation.mfu is not None else ""
    console.print(
        f"\n[bold]simulated[/] iteration {ms(simulation.iteration_ms)}, makespan {ms(simulation.makespan_ms)} "
        f"(planned {ms(plan)})\n  imbalance {simulation.imbalance:.1%}, "
        f"peak memory {max(simulation.peak_memory_gib, default=0.0):.3g} GiB{mfu}",
        highlight=False,
    )
