"""``arachnec profile``: measure a model's stages, and the links, on this machine."""

from __future__ import annotations

from pathlib import Path

import click

from arachnec.commands.options import cluster_option, columns_option, data_option
from arachnec.commands.progress import progress_on_stderr


@click.command("profile")
@click.argument("model", type=click.Path(path_type=Path))
@data_option()
@columns_option
@cluster_option("This machine")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), help="Write the profile here.")
@click.option("--dtype", type=click.Choice(["fp32", "bf16"]), default="fp32", help="The training option of this name.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=0),
    default=120.0,
    show_default=True,
    help="How long ranks measure, about: the shortest and the longest clips first, then what lies between.",
)
def command(model: Path, data: Path, columns: str, cluster: str, output: Path, dtype: str, seconds: float) -> None:
    """Time the stages of MODEL on clips of the manifest, on as many processes at once as the cluster has ranks, and fit
    the cost formulas that `annotate{profile=FILE}` reads.

    Interrupted, it writes what was measured so far.

    MODEL may be a sampler file, and the clips requests: then a step of each of its models is timed, as it is built.
    """
    from arachnec.commands.options import demand_file_can_be_written
    from arachnec.commands.sampler_options import is_sampler
    from arachnec.cost.profile import only_length
    from arachnec.ir.diagnostic import counted
    from arachnec.profiling.local import profile_here

    demand_file_can_be_written(output)
    samples = is_sampler(model)
    if samples and dtype != "fp32":
        raise click.UsageError("the models of a sampler file are timed as they are built: leave --dtype out")
    if samples and columns:
        raise click.UsageError("--columns is of clips, and a sampler file has requests: leave it out")
    with progress_on_stderr() as reporter:
        profile = profile_here(
            model,
            data,
            cluster,
            output,
            samples=samples,
            dtype=dtype,
            columns=columns,
            seconds=seconds,
            reporter=reporter,
        )
    from arachnec.commands.tables import plain_table, terminal

    table = plain_table("measured")
    for name in ("stage", "phase", "B", "S", "T", "ranks", "measured ms", "fitted ms"):
        table.add_column(name, justify="left" if name in ("stage", "phase") else "right")
    for stage in profile.stages:
        for run, residual in zip(stage.measurements, stage.fit.residuals, strict=True):
            sizes = (str(run.batch), str(run.tokens), str(run.text), str(run.degree))
            table.add_row(stage.stage, stage.phase, *sizes, f"{run.ms:.1f}", f"{run.ms * (1 + residual):.1f}")
    console = terminal()
    console.print(table)
    for stage in profile.stages:
        length = only_length(stage)
        if length is not None and stage.measurements[0].sizes is None:
            note = f"measured at {length} tokens only; what clips of another length take is a guess"
            console.print(f"{stage.stage} {stage.phase}: {note}", highlight=False)
    for stage in profile.stages:
        if stage.fit.held_out is not None:
            error = f"{100 * stage.fit.held_out:.0f} %"
            grows = "" if stage.fit.exponent is None else f", grows as S^{stage.fit.exponent:.2f}"
            sizes_measured = {tuple(run.sizes.items()) for run in stage.measurements if run.sizes is not None}
            note = (
                f"{counted(len(sizes_measured), 'size')} of clips taken as measured; the formula for others: "
                if sizes_measured
                else ""
            )
            note += f"mean error {error} on points held out{grows}"
            console.print(f"{stage.stage} {stage.phase}: {note}", highlight=False)
    if profile.links is not None:
        links = f"{profile.links.latency:.0f} us, {profile.links.intra:.2f} GB/s"
        console.print(f"links inside a machine: {links}", highlight=False)
    for end in profile.synchronisation:
        times = f"{end.reduce_ms:.1f} ms over {end.ranks} ranks, optimizer step {end.step_ms:.1f} ms"
        console.print(f"{end.stage}: gradient all-reduce {times}", highlight=False)
    console.print(f"wrote {output}", highlight=False, soft_wrap=True)
