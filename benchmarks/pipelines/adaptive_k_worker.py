"""One rank of ``adaptive_k.py``: steps of two executables in turn, while the links change between phases.

python -m benchmarks.pipelines.adaptive_k_worker OUT.json FABRIC MBIT,MBIT,... STEPS FOLDER...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.backends.torch_distributed.run.training_run import Trainer
from arachnec.executable.folder import read_executable
from arachnec.launch.ending import exit_with
from arachnec.launch.ranks import as_rank
from benchmarks.hosts.fabric import set_links


def rows(fabric: str, links: Sequence[float], steps: int, folders: Sequence[Path], device: torch.device) -> list[dict]:  # type: ignore[type-arg]
    """Of every step of every executable its phase, its time and its grouping; in a phase links have one speed."""
    trainers = {folder.name: Trainer(read_executable(folder), RunOptions(), device) for folder in folders}
    rows = []
    for phase, mbit in enumerate(links):
        dist.barrier()
        if dist.get_rank() == 0:
            set_links(fabric, dist.get_world_size(), mbit)
        dist.barrier()
        for step in range(phase * steps, (phase + 1) * steps):
            for name, trainer in trainers.items():
                took = trainer.step(step)
                grouping = trainer.module.attrs.get("grouping", 1)
                rows.append({"plan": name, "phase": phase, "step": step, "ms": took.step_ms, "k": grouping,
                              "loss": took.loss, "planning_ms": took.exposed_planning_ms})  # fmt: skip
    for trainer in trainers.values():
        trainer.close()
    return rows


def main(output: str, fabric: str, links: str, steps: str, *folders: str) -> None:
    def work(device: torch.device) -> None:
        speeds = [float(mbit) for mbit in links.split(",")]
        measured = rows(fabric, speeds, int(steps), [Path(folder) for folder in folders], device)
        if dist.get_rank() == 0:
            Path(output).write_text(json.dumps(measured))

    as_rank(work, cpu=True)


if __name__ == "__main__":
    exit_with(lambda: main(*sys.argv[1:]))
