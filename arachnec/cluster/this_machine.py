"""The machine at hand as the text of a cluster file: what its driver and its system say, without torch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import replace

from arachnec.cluster.detect import cluster_file, cpu_file
from arachnec.cluster.device_selection import MASK
from arachnec.cluster.nvidia_tools import QUERY, Device, parse_devices, parse_matrix
from arachnec.solver.budget import usable_cores

TIMEOUT = 60  # s: a driver that hangs must not take the command with it


def detected(tell: Callable[[str], None] = lambda note: None) -> str:
    """The text of a cluster file for this machine; ``tell`` is told where it has no GPU.

    Raises UserError where what its tools print is not understood, or its devices differ.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    devices = _by_nvml()
    if devices is None:
        listed = _output_of("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv")
        devices = parse_devices(listed, "nvidia-smi --query-gpu") if listed else ()
    shown = shown_devices(os.environ, len(devices))
    devices = tuple(devices[index] for index in shown)
    if not devices:
        tell("no GPU was found on this machine; the file describes its processor")
        return cpu_file(usable_cores(), memory)
    text = _output_of("nvidia-smi", "topo", "-m")
    matrix = parse_matrix(text, "nvidia-smi topo -m") if text else None
    if matrix is not None and shown and max(shown) < len(matrix.gpus):
        matrix = replace(matrix, gpus=tuple(matrix.gpus[index] for index in shown))
    return cluster_file(matrix, devices, memory)


def shown_devices(environment: Mapping[str, str], count: int) -> list[int]:
    """Which of so many devices CUDA_VISIBLE_DEVICES shows: all where it is not set, names them otherwise than by
    number, or stands in a rank's environment, where it may show that rank's device alone."""
    mask = environment.get(MASK)
    if mask is None or "RANK" in environment:
        return list(range(count))
    words = [word.strip() for word in mask.split(",") if word.strip()]
    if not all(word.isdecimal() for word in words):
        return list(range(count))
    return [int(word) for word in words if int(word) < count]


def _by_nvml() -> tuple[Device, ...] | None:
    """The devices by the driver's library, where its Python package is there and it answers; else None."""
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
