"""``arachnec compare``: every named pipeline on the same clips, model, cluster and costs."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from arachnec.commands.pass_options import PassOptions, pass_options


@click.command("compare")
@click.argument("model", type=click.Path(path_type=Path))
@click.option("--data", required=True, type=click.Path(path_type=Path), help="The clips: JSONL, CSV or Parquet.")
@click.option("--cluster", required=True, help="A TOML file, or a short form such as 2x8:h100-80g or 4:cpu.")
@click.option("--pipelines", help="Names of pipelines, or pipelines, separated by `;` or (names) `,`. Default: all.")
@click.option("--profile", type=click.Path(path_type=Path), help="Costs measured by `arachnec profile`.")
@click.option("--batch", type=click.IntRange(min=1), help="Clips in a global batch, where the manifest does not say.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of a table.")
@pass_options
def command(
    model: Path,
    data: Path,
    cluster: str,
    pipelines: str | None,
    profile: Path | None,
    batch: int | None,
    as_json: bool,
    options: PassOptions,
) -> None:
    """Plan the first iteration of the clips with every named pipeline and print what each would take."""
    from arachnec.commands.tables import comparison_table, terminal
    from arachnec.driver import compare

    if not names(pipelines):
        raise click.UsageError("--pipelines names none; leave it out to compare all")
    named = {name: options.pipeline(name, profile) for name in names(pipelines)}
    rows, refused = compare(model, data, cluster, named, batch=batch, instruments=options.instruments())
    if as_json:
        json.dump({"pipelines": rows, "refused": refused}, sys.stdout, indent=2)
        print()
        return
    console = terminal()
    console.print(comparison_table(rows))
    for row in refused:
        console.print(f"{row['pipeline']}: cannot train this batch: {row['reason']}")


def names(pipelines: str | None) -> list[str]:
    from arachnec.passes.pipelines import PIPELINES

    if pipelines is None:
        return list(PIPELINES)
    separator = ";" if ";" in pipelines or "{" in pipelines else ","
    return [part.strip() for part in pipelines.split(separator) if part.strip()]
