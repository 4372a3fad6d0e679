"""``arachnec generate``: from requests to videos or latents."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from arachnec.commands.options import (
    PassOptions,
    cluster_option,
    demand_inputs,
    output_folder_option,
    pass_options,
    print_json,
)
from arachnec.models.file import SAMPLER_FORM


@click.command("generate")
@click.argument("sampler", type=click.Path(path_type=Path))
@click.option("--data", required=True, type=click.Path(path_type=Path), help="The requests: JSONL, CSV or Parquet.")
@cluster_option()
@output_folder_option("Write latents and videos into this folder; what is finished there stays.")
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
@click.option("--profile", type=click.Path(path_type=Path), help="Costs measured by `arachnec profile`.")
@click.option("--plan-only", is_flag=True, help="Plan and prove, and print the plan; run nothing.")
@click.option(
    "--stall-timeout",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds beyond its planned time that an instruction or a denoising step may take which waits for no other; "
    "default: 60.",
)
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
    profile: Path | None,
    plan_only: bool,
    stall_timeout: float | None,
    as_json: bool,
    options: PassOptions,
) -> None:
    """Sample a video for every request with SAMPLER, a Python file with models, scheduler, start and arguments.

    A run that ended early goes on where it is started again. See docs/sampling.md.
    """
    from arachnec.cluster.file import parse_cluster
    from arachnec.data.requests import read_requests
    from arachnec.executable.folder import demand_folder

    demand_folder(output)
    demand_inputs(sampler, form=SAMPLER_FORM)
    read_requests(data)
    parse_cluster(cluster)
    pipeline = options.pipeline("generate" if passes is None else passes, profile)
    from arachnec.commands.generated import generate_here
    from arachnec.generation.run import prepare

    generation = prepare(
        sampler,
        data,
        cluster,
        output,
        switch=switch,
        first=first,
        history=history,
        passes=pipeline,
        instruments=options.instruments(),
    )
    if not plan_only:
        generate_here(generation, as_json, stall_timeout=stall_timeout)
        return
    if generation.compiled is None:
        click.echo("every request is finished")
        return
    from arachnec.commands.generated import print_request_plan
    from arachnec.report import plan_report

    report = plan_report(generation.compiled.module, generation.planning_ms)
    generation.compiled.write(generation.folder, report)
    if as_json:
        print_json(report)
    else:
        print_request_plan(generation.compiled.module, report, generation.compiled.tracing_ms, generation.folder)
