"""One rank of `prediction_accuracy.py`: measures the model and runs every plan, in turns."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from arachnec.backends.torch_distributed.batches.load_ahead import LoadAhead
from arachnec.backends.torch_distributed.executor.encoding import Specs
from arachnec.backends.torch_distributed.executor.interpreter import run_iteration
from arachnec.backends.torch_distributed.executor.iteration import Iteration
from arachnec.backends.torch_distributed.rank.rank_context import RankContext
from arachnec.data.clip import VideoClip
from arachnec.data.manifest import read_manifest
from arachnec.ir.nodes import Module
from arachnec.ir.parser import parse_module
from arachnec.kernels.attention.process_groups import ProcessGroups
from arachnec.launch.ending import exit_with
from arachnec.launch.ranks import as_rank
from arachnec.models.file import load_model_file
from arachnec.profiling.profiler import TRAINING, Profiler
from arachnec.runtime.agreement import gather
from arachnec.runtime.device_runtime import DeviceRuntime
from arachnec.runtime.handoffs import HandoffConnections, handoff_pairs
from arachnec.runtime.rank_resources import RankThreads, wanted_gradient_groups, wanted_groups
from arachnec.runtime.step_progress import Clock

MODEL = Path(__file__).with_name("prediction_model.py")


class Plans:
    """Every plan of the folder, ready to run on this rank with the profiler's model."""

    def __init__(self, folder: Path, profiler: Profiler, clips: list[VideoClip], device: torch.device) -> None:
        self.modules: list[Module] = []
        for path in sorted(folder.glob("*.cascade")):
            self.modules.append(parse_module(path.read_text(), str(path)))
        rank = dist.get_rank()
        runtime, threads = DeviceRuntime.of(device), RankThreads()
        self.context = RankContext(
            rank=rank,
            runtime=runtime,
            model_file=profiler.model_file,
            model=profiler.model,
            parameters=profiler.parameters,
            encoders=profiler.encoders,
            sequence=profiler.sequence,
            optimizer=profiler.optimizer,
            groups=ProcessGroups(),
            gradient_groups=ProcessGroups(),
            host_groups=ProcessGroups(),
            connections=HandoffConnections(),
            threads=threads,
            loads=LoadAhead(threads.loads, profiler.encoders, runtime),
            training=TRAINING,
        )
        specs = Specs(profiler.model_file, profiler.encoders, device)
        known = dict(enumerate(clips))
        self.iterations: list[Iteration] = []
        for module in self.modules:
            self.context.groups.ensure(wanted_groups(module))
            self.context.gradient_groups.ensure(wanted_gradient_groups(module), device=device)
            self.context.host_groups.ensure(wanted_gradient_groups(module), device=torch.device("cpu"))
            self.context.connections.ensure(handoff_pairs(module.programs))
            program = next(program for program in module.programs if program.rank == rank)
            received = specs.received(module, program, known)
            self.iterations.append(Iteration.of(module, rank, known, received, 0))

    def run(self, number: int) -> float:
        """ms of one iteration of a plan on this rank."""
        dist.barrier()
        clock = Clock(self.context.rank, self.context.runtime)
        started = time.perf_counter()
        run_iteration(self.context, self.iterations[number], clock)
        return (time.perf_counter() - started) * 1e3


def main(folder: str, at_once: str, rounds: str) -> None:
    def work(device: torch.device) -> None:
        place = Path(folder)
        clips = [clip for iteration in read_manifest(place / "clips.jsonl").iterations for clip in iteration]
        profiler = Profiler(load_model_file(MODEL), clips, device, int(at_once))
        plans = Plans(place, profiler, clips, device)
        count = len(plans.iterations)
        profiler.round()
        for number in range(count):
            plans.run(number)
        profiler.forget()
        times: list[list[float]] = []
        order, rng = list(range(count)), random.Random(0)
        for _ in range(int(rounds)):
            rng.shuffle(order)
            row = [0.0] * count
            half = count // 2
            for part in (order[:half], order[half:]):
                profiler.round()
                for number in part:
                    row[number] = plans.run(number)
            times.append(row)
        every = torch.stack(gather(torch.tensor(times, dtype=torch.float64))).amax(0)
        measured = profiler.measured()
        if dist.get_rank() == 0:
            (place / "measured.json").write_bytes(msgspec.json.encode(measured))
            (place / "times.json").write_text(json.dumps(every.T.tolist()))

    as_rank(work, cpu=True)


if __name__ == "__main__":
    exit_with(lambda: main(*sys.argv[1:]))
