"""``arachnec convert-checkpoint``: checkpoints of an earlier version into the present format."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("convert-checkpoint")
@click.argument("executable", type=click.Path(path_type=Path))
@click.argument("folder", type=click.Path(path_type=Path))
def command(executable: Path, folder: Path) -> None:
    """Rewrite the newest checkpoint of an earlier version in FOLDER, so that a run of EXECUTABLE resumes from it.

    It reads a pickle, restricted to the classes that a checkpoint is made of. The old one stays beside the new one, as
    `earlier-step-...`.
    """
    from arachnec.checkpoint.convert import convert_newest
    from arachnec.executable.folder import data_digest, read_executable

    read = read_executable(executable)
    click.echo(f"wrote {convert_newest(folder, data_digest(read.traced, read.clips))}")
