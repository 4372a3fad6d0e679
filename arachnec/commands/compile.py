"""``arachnec compile``: from model.py, clips and a cluster to a checked executable folder; from a sampler file too."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Literal

import click
import msgspec

from arachnec.backends.torch_distributed.options import training_options
from arachnec.commands.options import (
    PassOptions,
    batch_option,
    cluster_option,
    columns_option,
    data_option,
    demand_inputs,
    output_folder_option,
    pass_options,
    print_json,
)
from arachnec.commands.progress import progress_on_stderr
from arachnec.commands.sampler_options import OF_TRAINING, is_sampler, refuse, sampler_options
from arachnec.data.manifest import Batch
from arachnec.executable.training_options import Training


@click.command("compile")
@click.argument("model", type=click.Path(path_type=Path))
@data_option(required=False, more="; or a `mix` of options")
@columns_option
@cluster_option()
@output_folder_option("Write the executable into this folder.", required=False)
@click.option("--passes", help="A pipeline, or the name of one; default: `default`, of a sampler file `generate`.")
@click.option("--profile", type=click.Path(path_type=Path), help="Costs measured by `arachnec profile`.")
@batch_option
@sampler_options
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of a table.")
@click.option("--init", type=click.Path(path_type=Path), help="Hold the weights in this folder against the model.")
@click.option("--run", "then_run", is_flag=True, help="Train on this machine afterwards.")
@click.option("--steps", type=click.IntRange(min=1), default=1, show_default=True, help="Steps to train with --run.")
@training_options
@pass_options
def command(
    model: Path,
    data: Path | None,
    columns: str,
    cluster: str,
    output: Path | None,
    passes: str | None,
    profile: Path | None,
    batch: Batch,
    switch: str | None,
    first: str | None,
    history: Literal["carry", "restart"] | None,
    as_json: bool,
    init: Path | None,
    then_run: bool,
    steps: int,
    training: Training,
    options: PassOptions,
) -> None:
    """Trace MODEL (a Python file with build, sample and loss), plan one iteration of the clips, prove the plan, and
    write the executable.

    MODEL may be a sampler file, and the clips requests: then all of them are planned, and `arachnec run` samples them.
    """
    from arachnec.executable.folder import demand_folder

    if then_run and output is None:
        raise click.UsageError("--run needs a folder for the executable: add -o DIR")
    if output is not None:
        demand_folder(output)
    gc.set_threshold(50_000, 20, 100)  # what tracing makes lives until it is planned: looking for garbage finds none
    if is_sampler(model):
        refuse(
            {"--batch": batch, "--columns": columns or None, "--init": init, "--steps": steps if steps != 1 else None},
            OF_TRAINING,
        )
        refuse({"--set and other training options": training if training != Training() else None}, OF_TRAINING)
        if data is None:
            raise click.UsageError("--data is missing: the requests to sample")
        compile_sampler(model, data, cluster, output, passes, profile, (switch, first, history), as_json, options)
        if then_run and output is not None:
            from arachnec.commands.run import command as run

            run.main([str(output)], standalone_mode=False)
        return
    refuse({"--switch": switch, "--first": first, "--history": history}, f"of a sampler file; {model} has no `models`")
    demand_inputs(model, init=init)
    if columns:
        training = msgspec.structs.replace(training, columns=columns)
    pipeline = options.pipeline("default" if passes is None else passes, profile)
    from arachnec.commands.tables import print_plan
    from arachnec.driver import compile as compile_model

    with progress_on_stderr() as reporter:
        compiled = compile_model(
            model,
            data,
            cluster,
            passes=pipeline,
            batch=batch,
            training=training,
            init=init,
            instruments=options.instruments(),
            reporter=reporter,
        )
    folder = compiled.write(output, load=options.files) if output is not None else None
    if as_json:
        print_json(compiled.report)
    else:
        print_plan(compiled, folder)
    if then_run and folder is not None:
        from arachnec.commands.run import command as run

        begun = [] if init is None else ["--init", str(init)]
        run.main([str(folder), "--steps", str(steps), *begun], standalone_mode=False)


def compile_sampler(
    sampler: Path,
    data: Path,
    cluster: str,
    output: Path | None,
    passes: str | None,
    profile: Path | None,
    how: tuple[str | None, str | None, Literal["carry", "restart"] | None],
    as_json: bool,
    options: PassOptions,
) -> None:
    """The same of a sampler file and requests. ``how`` are switch, first model and history, as they were given."""
    from arachnec.cluster.file import parse_cluster
    from arachnec.data.requests import read_requests

    requests, machine = read_requests(data), parse_cluster(cluster)
    pipeline = options.pipeline("generate" if passes is None else passes, profile)
    from arachnec.commands.generated import print_request_plan
    from arachnec.generation.plan import asked, compile_requests
    from arachnec.report import plan_report

    switch, first, history = how
    sampling, settings = asked(sampler, switch, first, history or "carry", pipeline)
    with progress_on_stderr() as reporter:
        compiled = compile_requests(
            sampling, settings, requests, machine, pipeline, options.instruments(), reporter=reporter
        )
    report = plan_report(compiled.module, compiled.planning_ms)
    folder = compiled.write(output, report, options.files) if output is not None else None
    if as_json:
        print_json(report)
    else:
        print_request_plan(compiled.module, report, compiled.tracing_ms, folder)
