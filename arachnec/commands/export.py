"""``arachnec export``: a checkpoint's model as a folder that Diffusers loads."""

from __future__ import annotations

from pathlib import Path

import click

from arachnec.commands.options import output_folder_option


@click.command("export")
@click.argument("executable", type=click.Path(path_type=Path))
@click.option(
    "--checkpoint",
    required=True,
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="The folder of the run's checkpoints.",
)
@output_folder_option("Write the weights and their config into this folder.")
@click.option(
    "--init", type=click.Path(path_type=Path), help="What was --init of the run, where weights stayed frozen."
)
@click.option("--ema", is_flag=True, help="The averages of the weights instead of the weights.")
@click.option(
    "--lora", is_flag=True, help="The adapter alone, for load_lora_weights; else it is added into its layers."
)
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    help="Precision; default: what it trained in, of your own loop what the model file builds.",
)
def command(
    executable: Path, checkpoint: Path, output: Path, init: Path | None, ema: bool, lora: bool, dtype: str | None
) -> None:
    """Write the newest checkpoint of a run of EXECUTABLE as safetensors, under the model's original names.

    Of your own loop give the model file in its place.
    """
    from arachnec.executable.folder import demand_folder, read_executable
    from arachnec.export.folder import export
    from arachnec.models.file import load_model_file

    demand_folder(output)
    read = load_model_file(executable) if executable.suffix == ".py" else read_executable(executable)
    exported = export(read, checkpoint, output, init=init, averages=ema, lora=lora, dtype=dtype)
    click.echo(
        f"wrote {', '.join(str(path) for path in exported.files)}\n"
        f"{exported.tensors} tensors, {exported.bytes / 2**30:.3g} GiB, after {exported.steps} steps\n"
        f"load with: {exported.loading}"
    )
