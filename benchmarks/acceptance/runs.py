"""A manifest, an executable and a run of it by the command line: what the sections of whole runs share."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gradient_parity as parity
from acceptance.machine import Machine, Row

from arachnec.commands.pass_options import PassOptions
from arachnec.driver import compile
from arachnec.passes.infra.registry import installed

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
    **more: Any,
) -> Path:
    """The folder of an executable for one device; planned in this process, which has imported everything."""
    options = PassOptions(installed(), (), (), False, None, None)
    cluster = more.pop("cluster", machine.cluster(1))
    return compile(model, data, cluster, passes=options.pipeline(passes, profile), **more).write(machine.scratch / name)


def ran(folder: Path, steps: int, *options: object) -> Row:
    """The report of a run."""
    parity.command("run", folder, "--steps", steps, "--no-equivalence", *options)
    read: Row = json.loads((folder / "run.json").read_text())
    return read


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
