"""One rank of `peak_memory.py`: the most MiB that are ever resident."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.backends.torch_distributed.run.training_run import Trainer
from arachnec.executable.folder import read_executable
from arachnec.launch.ending import exit_with
from arachnec.launch.ranks import as_rank
from arachnec.runtime.agreement import gather
from benchmarks.sharded.fsdp2_rank import resident

STEPS = 3


def main(folder: str) -> None:
    def work(device: torch.device) -> None:
        executable = read_executable(Path(folder))
        trainer = Trainer(executable, RunOptions(), device)
        for number in range(STEPS):
            trainer.step(number)
        own = torch.tensor([resident("VmHWM")], dtype=torch.float64)
        everyone = [float(value) for value in gather(own)]
        if dist.get_rank() == 0:
            (Path(folder) / "peak.json").write_text(json.dumps(everyone))

    as_rank(work, cpu=True)


if __name__ == "__main__":
    exit_with(lambda: main(*sys.argv[1:]))
