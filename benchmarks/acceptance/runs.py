"""A manifest, an executable and a run of it: what the sections of whole runs share.

Most runs have the section's own process as their rank: to start one and load every kernel takes longer than these
steps do. Each section has one at least that a command starts.
"""

from __future__ import annotations

import functools
import gc
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradient_parity as parity
import torch
import torch.distributed as dist
from acceptance.machine import Machine, Row

from arachnec.backends.torch_distributed.engine import train
from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.cluster.file import parse_cluster
from arachnec.commands.options import PassOptions
from arachnec.driver import Compiled, compile, plan_iteration, plan_model
from arachnec.executable.folder import read_executable
from arachnec.passes.infra.base import installed

HEAD = "import torch\nfrom arachnec.models.diffusers import wan\n\n"
END = "build, sample, loss = model.build, model.sample, model.loss\n"


def jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def wan_file(machine: Machine, name: str, options: str) -> Path:
    """A model file: Wan2.1, with these options of ``text_to_video``."""
    path = machine.scratch / f"{name}.py"
    path.write_text(f"{HEAD}model = wan.text_to_video({options})\n{END}")
    return path


def compiled(
    machine: Machine,
    name: str,
    model: Path,
    data: Path,
    passes: str = "default",
    profile: Path | None = None,
    cluster: Path | None = None,
) -> Path:
    """The folder of an executable for one device; planned in this process, which has imported everything. A model is
    traced once for all of a section's plans."""
    first = _by_default(model, data, machine.cluster(1))
    pipeline = PassOptions(installed(), (), (), False, None, None).pipeline(passes, profile)
    traced = replace(first.traced, cluster=parse_cluster(cluster or machine.cluster(1)))
    planned, model_ms = plan_model(traced, pipeline)
    module, ms = plan_iteration(planned, pipeline, 0)
    parts = {"traced": traced, "model": planned, "pipeline": pipeline, "module": module}
    return replace(first, **parts, planning_ms=model_ms + ms).write(machine.scratch / name)


@functools.cache
def _by_default(model: Path, data: Path, cluster: str) -> Compiled:
    return compile(model, data, cluster)


def ran(machine: Machine, folder: Path, steps: int, **options: Any) -> Row:
    """The report of a run in this process, and what the device held before it, GiB."""
    device = only_rank(machine)
    gc.collect()  # an engine before
    machine.empty_cache()
    held = 0.0 if machine.dry else torch.cuda.memory_allocated() / 2**30
    train(read_executable(folder), RunOptions(steps=steps, **options), device)
    return {**report_of(folder), "held_gib": held}


def ran_by_command(folder: Path, steps: int, *options: object) -> Row:
    """The report of ``arachnec run``."""
    parity.command("run", folder, "--steps", steps, "--no-equivalence", *options)
    return report_of(folder)


def report_of(folder: Path) -> Row:
    read: Row = json.loads((folder / "run.json").read_text())
    return read


def only_rank(machine: Machine) -> torch.device:
    """This process as the one rank of a run; its device."""
    device = torch.device("cpu") if machine.dry else torch.device("cuda", 0)
    if not dist.is_initialized():
        backend, own = ("gloo", None) if machine.dry else ("cpu:gloo,cuda:nccl", device)
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, device_id=own)
    return device


def losses(report: Row) -> list[float | None]:
    """None where one is not finite."""
    return [step["loss"] for step in report["steps"]]


def median(steps: Sequence[Row], key: str) -> float:
    return statistics.median(step[key] for step in steps)


def apart(values: Sequence[float | None], expected: Sequence[float | None]) -> float:
    """The largest relative difference; infinite where a value is no number, or the lists are not equally long."""
    pairs = list(zip(values, expected, strict=False))
    if len(values) != len(expected) or any(a is None or b is None for a, b in pairs):
        return float("inf")
    return max(abs(a - b) / abs(b) for a, b in pairs)
