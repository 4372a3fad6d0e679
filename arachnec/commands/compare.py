"""``arachnec compare``: every named pipeline on the same clips, model, cluster and costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from arachnec.commands.options import (
    PassOptions,
    batch_option,
    cluster_option,
    columns_option,
    data_option,
    demand_inputs,
    pass_options,
    print_json,
)
from arachnec.commands.progress import progress_on_stderr
from arachnec.commands.sampler_options import is_sampler
from arachnec.data.manifest import Batch

if TYPE_CHECKING:
    from arachnec.driver import Compared


@click.command("compare")
@click.argument("model", type=click.Path(path_type=Path))
@data_option()
@columns_option
@cluster_option()
@click.option("--pipelines", help="Names of pipelines, or pipelines, separated by `;` or (names) `,`. Default: all.")
@click.option("--profile", type=click.Path(path_type=Path), help="Costs measured by `arachnec profile`.")
@batch_option
@click.option("--switch", help="Of a sampler file: when the second model takes over, as for `arachnec generate`.")
@click.option("--svg", "--plot", "svg", type=click.Path(path_type=Path), help="Draw times and timelines there.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of a table.")
@pass_options
def command(
    model: Path,
    data: Path,
    columns: str,
    cluster: str,
    pipelines: str | None,
    profile: Path | None,
    batch: Batch,
    switch: str | None,
    svg: Path | None,
    as_json: bool,
    options: PassOptions,
) -> None:
    """Plan the first iteration of the clips with every named pipeline and print what each would take.

    MODEL may be a sampler file, and the clips requests: then those of the pipelines that sample are compared.

    Times, imbalance, MFU and memory are the simulator's. MFU is model FLOPs without recomputation over what the
    devices could do at their specified peak; a dash where either is not known. `x bound` is makespan over the lower
    bound of a pipeline's own micro-batches.
    """
    samples = is_sampler(model)
    if not names(pipelines, samples):
        raise click.UsageError("--pipelines names none; leave it out to compare all")
    demand_inputs(model)
    named = {name: options.pipeline(name, profile) for name in names(pipelines, samples)}
    instruments = options.instruments()
    from arachnec.commands.tables import terminal
    from arachnec.driver import compare, compare_requests

    if samples:
        if batch is not None or columns:
            given = "columns" if batch is None else "batch"
            raise click.UsageError(f"--{given} is of training; requests come as they are")
        with progress_on_stderr() as reporter:
            plans, refused = compare_requests(
                model, data, cluster, named, switch=switch, instruments=instruments, reporter=reporter
            )
    else:
        if switch is not None:
            raise click.UsageError(f"--switch is of a sampler file; {model} has no `models`")
        with progress_on_stderr() as reporter:
            plans, refused = compare(
                model, data, cluster, named, batch=batch, columns=columns, instruments=instruments, reporter=reporter
            )
    rows = [plan.report for plan in plans]
    if as_json:
        print_json({"pipelines": rows, "refused": refused})
    else:
        _print(rows, refused, samples)
    if svg is not None:  # last: what took minutes to plan is on the screen where the file cannot be written
        svg.write_text(drawing(model, plans, samples), encoding="utf-8")
        if not as_json:
            terminal().print(f"wrote {svg}")


def _print(rows: Sequence[Mapping[str, Any]], refused: Sequence[Mapping[str, str]], samples: bool) -> None:
    from arachnec.commands.tables import comparison_bars, comparison_table, terminal

    console = terminal()
    console.print(comparison_table(rows, samples))
    for line in comparison_bars(rows, min(100, console.width), samples):
        console.print(line, highlight=False, soft_wrap=True)
    console.print()
    for row in refused:
        console.print(f"{row['pipeline']}: cannot run this: {row['reason']}", highlight=False, soft_wrap=True)
    if samples:
        console.print("every pipeline here takes each step of each request once")
        return
    leaving_out = [row for row in rows if row["original_clips"]]
    console.print(
        f"every pipeline here trains each clip once{'; the originals of these do not:' if leaving_out else ''}"
    )
    for row in leaving_out:
        console.print(f"  {row['pipeline']} {row['original_clips']}", highlight=False, soft_wrap=True)
    for plan in rows:
        for stage in plan["sparse"]:
            console.print(f"{plan['pipeline']} {told_of_sparse(stage)}", highlight=False, soft_wrap=True)


def told_of_sparse(stage: Mapping[str, Any]) -> str:
    """What a pipeline with densities does to the result, by its report of a stage."""
    if not stage["cascades"]:
        return (
            f"attends to all keys of {stage['stage']}: for clips of these lengths the choice takes longer than it saves"
        )
    keys = f"{stage['predicted_density']:.0%} of the keys of {stage['stage']}"
    if stage["dense_cascades"]:
        keys += f" in {stage['cascades']} of {stage['cascades'] + stage['dense_cascades']} cascades"
    why = "as assumed or read from a file: its gradients are others, and its MFU counts dense attention"
    return f"attends to {keys}, {why}"


def drawing(model: Path, plans: Sequence[Compared], samples: bool = False) -> str:
    """Bars and timelines of all, as SVG."""
    from arachnec.cluster.topology import named
    from arachnec.ir.diagnostic import counted
    from arachnec.ir.nodes import quantity
    from arachnec.ir.sampling import objective_of
    from arachnec.views.timeline_svg import Plan, draw_comparison

    module = plans[0].module
    assert module.cluster is not None
    cluster = named(module.cluster)
    what = f"{len(module.clips)} clips on {cluster}: one iteration"
    if samples:
        what = f"{counted(len(module.clips), 'request')} on {cluster}"
    return draw_comparison(
        f"{model.stem}, {what}",
        [
            Plan(
                plan.name,
                plan.module,
                plan.simulation.timeline,
                plan.simulation.makespan_ms,
                plan.simulation.iteration_ms,
                quantity(plan.module.attrs["bound"]) if objective_of(plan.module) == "makespan" else 0.0,
            )
            for plan in plans
        ],
    )


def names(pipelines: str | None, samples: bool = False) -> list[str]:
    """The pipelines that are asked for; all that train, or all that sample, where none is."""
    from arachnec.passes.infra.named_pipelines import NOT_COMPARED, PIPELINES, SAMPLING_PIPELINES

    if pipelines is None and samples:
        return list(SAMPLING_PIPELINES)
    if pipelines is None:
        return [name for name in PIPELINES if name not in NOT_COMPARED]
    separator = ";" if ";" in pipelines or "{" in pipelines else ","
    return [part.strip() for part in pipelines.split(separator) if part.strip()]
