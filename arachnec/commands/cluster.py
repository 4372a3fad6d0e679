"""``arachnec cluster detect``: the machine at hand, or one that saved what it says, as a cluster file."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import click

from arachnec.commands.groups import SuggestingGroup

if TYPE_CHECKING:
    from arachnec.cluster.nvidia_tools import Device

TIMEOUT = 60  # s: a driver that hangs must not take the command with it


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
    text = _saved(files) if files else detected()
    if output is None:
        click.echo(text, nl=False)
        return
    output.write_text(text, encoding="utf-8")
    click.echo(f"wrote {output}")


def _saved(files: tuple[Path, ...]) -> str:
    from arachnec.cluster.detect import cluster_file
    from arachnec.cluster.nvidia_tools import Device, is_device_list, parse_devices, parse_matrix

    matrix, devices = None, tuple[Device, ...]()
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")
        if is_device_list(text):
            devices = parse_devices(text, str(file))
        else:
            matrix = parse_matrix(text, str(file))
    return cluster_file(matrix, devices)


def detected() -> str:
    from arachnec.cluster.detect import cluster_file, cpu_file
    from arachnec.cluster.nvidia_tools import QUERY, parse_devices, parse_matrix
    from arachnec.solver.budget import usable_cores

    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    devices = _by_nvml()
    if devices is None:
        listed = _output_of("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv")
        devices = parse_devices(listed, "nvidia-smi --query-gpu") if listed else ()
    if not devices:
        click.echo("no GPU was found on this machine; the file describes its processor", err=True)
        return cpu_file(usable_cores(), memory)
    matrix = _output_of("nvidia-smi", "topo", "-m")
    return cluster_file(parse_matrix(matrix, "nvidia-smi topo -m") if matrix else None, devices, memory)


def _by_nvml() -> tuple[Device, ...] | None:
    """The devices by the driver's library, where its Python package is there and it answers; else None."""
    from arachnec.cluster.nvidia_tools import Device

    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return tuple(
            Device(_text(pynvml.nvmlDeviceGetName(handle)), pynvml.nvmlDeviceGetMemoryInfo(handle).total // 2**20)
            for handle in handles
        )
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _text(name: str | bytes) -> str:
    return name.decode() if isinstance(name, bytes) else name  # older packages give bytes


def _output_of(*words: str) -> str | None:
    """What a program prints; None where it is not there or fails."""
    try:
        completed = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return completed.stdout if completed.returncode == 0 else None
