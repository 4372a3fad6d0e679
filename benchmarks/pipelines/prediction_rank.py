"""One rank of `prediction.py`: measures the model and takes a step of every plan, in turns."""

from __future__ import annotations

import json
import math
import random
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.backends.torch_distributed.run.training_run import Trainer
from arachnec.data.manifest import read_manifest
from arachnec.executable.folder import read_executable
from arachnec.launch.ending import exit_with
from arachnec.launch.ranks import as_rank
from arachnec.models.file import load_model_file
from arachnec.profiling.profiler import Profiler
from arachnec.runtime.agreement import gather
from arachnec.runtime.step_progress import Interval
from benchmarks.pipelines.torch_peer import MODEL

KINDS = ("forward", "backward", "weight", "norm", "step", "reduce", "send", "free", "wait", "faults", "processor")
WARMING = 4  # steps of every plan: its memory grows until then, and costs a fault for each new page


def main(folder: str, at_once: str, rounds: str) -> None:
    place = Path(folder)

    def work(device: torch.device) -> None:
        clips = read_manifest(place / "all.jsonl").clips
        profiler = Profiler(load_model_file(MODEL), clips, device, int(at_once))
        executables = [read_executable(path) for path in sorted(place.glob("[0-9][0-9][0-9]"))]
        trainers = [Trainer(executable, RunOptions(), device) for executable in executables]
        profiler.round()
        for _ in range(WARMING):
            for trainer in trainers:
                trainer.step(0)
        profiler.forget()
        times: list[list[float]] = []
        kinds: list[list[list[float]]] = []
        order, rng = list(range(len(trainers))), random.Random(0)
        for number in range(1, int(rounds) + 1):
            rng.shuffle(order)
            row = [0.0] * len(order)
            kinds.append([[] for _ in order])
            half = len(order) // 2
            for part in (order[:half], order[half:]):
                profiler.round()
                for plan in part:
                    dist.barrier()
                    before, faults = time.process_time(), page_faults()
                    row[plan] = trainers[plan].step(number).step_ms
                    used = (time.process_time() - before) * 1e3
                    kinds[-1][plan] = [*by_kind(trainers[plan].intervals), page_faults() - faults, used]
            times.append(row)
        every = torch.stack(gather(torch.tensor(times, dtype=torch.float64))).amax(0)
        spent = torch.stack(gather(torch.tensor(kinds, dtype=torch.float64))).mean(0).quantile(0.5, dim=0)
        measured = profiler.measured()
        if dist.get_rank() == 0:
            (place / "measured.json").write_bytes(msgspec.json.encode(measured))
            (place / "times.json").write_text(json.dumps(every.T.tolist()))
            rows = [dict(zip(KINDS, plan, strict=True)) for plan in spent.tolist()]
            (place / "kinds.json").write_text(json.dumps(rows))

    as_rank(work, cpu=True)


def by_kind(intervals: Sequence[Interval]) -> list[float]:
    """ms in each kind of instruction: `KINDS` but the last two, which are of the whole step."""
    return [math.fsum(i.end - i.start for i in intervals if i.op == kind) for kind in KINDS[:-2]]


def page_faults() -> float:
    """Thousands of pages that this rank has asked the system for."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt / 1e3


if __name__ == "__main__":
    exit_with(lambda: main(*sys.argv[1:]))
