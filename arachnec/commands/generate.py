"""``arachnec generate``: from requests to videos or latents."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Literal

import click

from arachnec.commands.pass_options import PassOptions, pass_options


@click.command("generate")
@click.argument("sampler", type=click.Path(path_type=Path))
@click.option("--data", required=True, type=click.Path(path_type=Path), help="The requests: JSONL, CSV or Parquet.")
@click.option("--cluster", required=True, help="A TOML file, or a short form such as 4:cpu.")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path, file_okay=False, writable=True),
    help="Write latents and videos into this folder; what is finished there stays.",
)
@click.option("--switch", help="When the second model takes over: fixed=K, boundary=R, adaptive=X[,least=N][,most=N].")
@click.option("--first", help="The model that takes the first steps; default: the first that the file names.")
@click.option(
    "--history",
    type=click.Choice(["carry", "restart"]),
    default="carry",
    show_default=True,
    help="What a scheduler with memory does at the switch.",
)
@click.option("--passes", help="A pipeline of passes that plans the requests.")
@click.option("--plan-only", is_flag=True, help="Plan and prove, and print the plan; run nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of a table.")
@pass_options
def command(
    sampler: Path,
    data: Path,
    cluster: str,
    output: Path,
    switch: str | None,
    first: str | None,
    history: Literal["carry", "restart"],
    passes: str | None,
    plan_only: bool,
    as_json: bool,
    options: PassOptions,
) -> None:
    """Sample a video for every request with SAMPLER, a Python file with models, scheduler, start and arguments.

    A run that ended early goes on where it is started again. See docs/sampling.md.
    """
    from arachnec.executable.folder import demand_folder
    from arachnec.generation.plan import DEFAULT
    from arachnec.generation.run import prepare, run_here
    from arachnec.generation.settings import PLAN, PROGRAM, write_plan
    from arachnec.ir.printer import print_module
    from arachnec.launch.local_ranks import RankCrashed

    demand_folder(output)
    generation = prepare(
        sampler,
        data,
        cluster,
        output,
        switch=switch,
        first=first,
        history=history,
        passes=options.pipeline(passes or DEFAULT, None),
    )
    if plan_only:
        if generation.module is None:
            click.echo("every request is finished")
            return
        from arachnec.commands.request_tables import print_request_plan
        from arachnec.report import plan_report

        write_plan(output, print_module(generation.module), generation.requests, generation.settings)
        report = plan_report(generation.module, generation.planning_ms)
        if as_json:
            json.dump(report, sys.stdout, indent=2)
            print()
        else:
            print_request_plan(generation.module, report, generation.tracing_ms, output / PLAN / PROGRAM)
        return
    output.mkdir(parents=True, exist_ok=True)
    try:
        report = run_here(generation)
    except RankCrashed as crash:
        # The launcher's own traceback would only hide the rank's.
        print(crash, file=sys.stderr)
        sys.exit(1)
    if as_json:
        json.dump(report, sys.stdout, indent=2)
        print()
        return
    for row in report["requests"]:
        where = row.get("video") or row["latents"]
        switched = "" if row["switched"] is None or len(report["models"]) == 1 else f", {row['switched']} by the first"
        ended = "finished before" if row["earlier"] else f"after {row['seconds']:.1f} s"
        click.echo(f"{row['id']}: {row['steps']} steps{switched}, {ended}: {where}")
    click.echo(f"{len(report['requests'])} requests, {report['seconds']:.1f} s on {report['ranks']} ranks")
