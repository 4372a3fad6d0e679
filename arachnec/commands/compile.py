"""``arachnec compile``: from model.py, clips and a cluster to a checked executable folder."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from arachnec.backends.torch_distributed.options import training_options
from arachnec.commands.pass_options import PassOptions, pass_options
from arachnec.executable.training_options import Training


@click.command("compile")
@click.argument("model", type=click.Path(path_type=Path))
@click.option(
    "--data", type=click.Path(path_type=Path), help="The clips: JSONL, CSV or Parquet; or a `mix` of options."
)
@click.option("--cluster", required=True, help="A TOML file, or a short form such as 2x8:h100-80g or 4:cpu.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, file_okay=False, writable=True),
    help="Write the executable into this folder.",
)
@click.option("--passes", default="default", show_default=True, help="A pipeline, or the name of one.")
@click.option("--profile", type=click.Path(path_type=Path), help="Costs measured by `arachnec profile`.")
@click.option("--batch", type=click.IntRange(min=1), help="Clips in a global batch, where the manifest does not say.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of a table.")
@click.option("--init", type=click.Path(path_type=Path), help="Hold the weights in this folder against the model.")
@click.option("--run", "then_run", is_flag=True, help="Train on this machine afterwards.")
@click.option("--steps", type=click.IntRange(min=1), default=1, show_default=True, help="Steps to train with --run.")
@training_options
@pass_options
def command(
    model: Path,
    data: Path | None,
    cluster: str,
    output: Path | None,
    passes: str,
    profile: Path | None,
    batch: int | None,
    as_json: bool,
    init: Path | None,
    then_run: bool,
    steps: int,
    training: Training,
    options: PassOptions,
) -> None:
    """Trace MODEL (a Python file with build, sample and loss), plan one iteration of the clips, prove the plan, and
    write the executable."""
    from arachnec.commands.tables import print_plan
    from arachnec.driver import compile as compile_model
    from arachnec.executable.folder import demand_folder
    from arachnec.models.initial_weights import demand_fit

    if then_run and output is None:
        raise click.UsageError("--run needs a folder for the executable: add -o DIR")
    if output is not None:
        demand_folder(output)
    if init is not None:
        demand_fit(init, model)
    compiled = compile_model(
        model,
        data,
        cluster,
        passes=options.pipeline(passes, profile),
        batch=batch,
        training=training,
        instruments=options.instruments(),
    )
    folder = compiled.write(output, load=options.files) if output is not None else None
    if as_json:
        json.dump(compiled.report, sys.stdout, indent=2)
        print()
    else:
        print_plan(compiled, folder)
    if then_run and folder is not None:
        from arachnec.commands.run import command as run

        begun = [] if init is None else ["--init", str(init)]
        run.main([str(folder), "--steps", str(steps), *begun], standalone_mode=False)
