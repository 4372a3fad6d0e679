"""``arachnec plan``: schedule cascades whose durations somebody measured."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from arachnec.commands.options import cluster_option, print_json
from arachnec.ir.limits import TABLE_ROWS

DEFAULT_PASSES = "schedule-z3{budget=10s},place"


@click.command("plan")
@click.argument("table", type=click.Path(path_type=Path))
@cluster_option()
@click.option("--passes", default=DEFAULT_PASSES, show_default=True, help="A scheduler, and place.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of a table.")
def command(table: Path, cluster: str, passes: str, as_json: bool) -> None:
    """Choose degree, start and GPUs for every stage of the tasks in TABLE, a JSON file of durations per degree:

    {"unit": "ms", "tasks": [{"name": "a", "stages": [{"stage": "vae", "ms": {"1": 41200, "2": 25100}}, ...]}]}
    """
    from arachnec.cluster.file import parse_cluster
    from arachnec.ir.nodes import Level
    from arachnec.passes.infra.pipeline import Pipeline
    from arachnec.planning.duration_table import read_table
    from arachnec.report import plan_report

    measured = read_table(table, parse_cluster(cluster))
    pipeline = Pipeline.parse(passes)
    pipeline.demand(Level.COSTED, Level.PLACED)
    started = time.perf_counter()
    module = pipeline.run(measured.module)
    report = plan_report(module, (time.perf_counter() - started) * 1e3)
    for row in report["cascades"]:
        row["name"] = measured.tasks[row["name"]]
    if as_json:
        print_json(report)
    else:
        _print(report)


def _print(report: dict[str, Any]) -> None:
    from arachnec.commands.tables import ms, plain_table, ranges, terminal

    rows = sorted(report["cascades"], key=lambda row: (row["start_ms"], row["name"]))
    shown = plain_table(f"{len(rows)} cascades")
    for column in ("task", "stage", "degree", "start", "end", "ranks"):
        shown.add_column(column, justify="right" if column in {"degree", "start", "end"} else "left")
    for row in rows[:TABLE_ROWS]:
        cells = (row["name"], row["stage"], str(row["degree"]), ms(row["start_ms"]), ms(row["end_ms"]))
        shown.add_row(*cells, ranges(row["ranks"]))
    console = terminal()
    console.print(shown)
    if len(rows) > TABLE_ROWS:
        console.print(f"  ... and {len(rows) - TABLE_ROWS} more; `--json` has them all")
    proved = ", proved optimal" if report["proved_optimal"] else ""
    console.print(
        f"makespan {ms(report['makespan_ms'])}, lower bound {ms(report['bound_ms'])}, gap {report['gap']:.2%}{proved}\n"
        f"imbalance {report['imbalance']:.1%}, planned in {ms(report['planning_ms'])}"
    )
