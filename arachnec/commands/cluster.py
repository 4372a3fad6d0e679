"""``arachnec cluster detect``: the machine at hand, or one that saved what it says, as a cluster file."""

from __future__ import annotations

from pathlib import Path

import click

from arachnec.commands.groups import SuggestingGroup


@click.group("cluster", cls=SuggestingGroup)
def command() -> None:
    """Cluster files: what a plan is made for."""


@command.command("detect")
@click.option(
    "--from",
    "files",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Read what `nvidia-smi topo -m` or `nvidia-smi --query-gpu` printed elsewhere; may be given for both.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the cluster file there.")
def detect(files: tuple[Path, ...], output: Path | None) -> None:
    """Write a cluster file for one node: its devices, how they are joined, its NICs, and what is not known."""
    from arachnec.cluster.detect import detected

    text = _saved(files) if files else detected(tell=lambda note: click.echo(note, err=True))
    if output is None:
        click.echo(text, nl=False)
        return
    output.write_text(text, encoding="utf-8")
    click.echo(f"wrote {output}")


def _saved(files: tuple[Path, ...]) -> str:
    from arachnec.cluster.detect import Device, cluster_file, is_device_list, parse_devices, parse_matrix

    matrix, devices = None, tuple[Device, ...]()
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")
        if is_device_list(text):
            devices = parse_devices(text, str(file))
        else:
            matrix = parse_matrix(text, str(file))
    return cluster_file(matrix, devices)
