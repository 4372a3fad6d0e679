"""A step on a device of streams: only a handoff's thread waits for it, and it needs the memory that was proved."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from arachnec.analysis.memory import usages
from arachnec.analysis.uses import Values
from arachnec.backends.cascade_step import trained_parameters
from arachnec.backends.torch_distributed.clock import Clock
from arachnec.backends.torch_distributed.device_runtime import DeviceRuntime
from arachnec.backends.torch_distributed.gradient_precision import keep_gradients
from arachnec.backends.torch_distributed.handoff_connections import HandoffConnections
from arachnec.backends.torch_distributed.interpreter import Iteration, RankContext, program_of, run_iteration
from arachnec.backends.torch_distributed.load_ahead import LoadAhead
from arachnec.backends.torch_distributed.optimizer import Optimizer
from arachnec.backends.torch_distributed.process_groups import wanted_gradient_groups, wanted_groups
from arachnec.backends.torch_distributed.rank_threads import RankThreads
from arachnec.backends.torch_distributed.sharded_blocks import Sequences
from arachnec.driver import compile
from arachnec.executable.training_options import Training
from arachnec.kernels.attention.process_groups import ProcessGroups
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.passes.infra.registry import installed, load_file
from tests.distributed import fake_device

ROOT = Path(__file__).parents[3]
PASSES = ROOT / "tests" / "acceptance" / "passes.py"
RANKS = 4
MODEL = """
import torch
from arachnec.models.diffusers import wan

model = wan.text_to_video("Wan2.1-T2V-1.3B", num_layers=4, dtype=torch.bfloat16)
build, sample, loss = model.build, model.sample, model.loss
"""
CLIPS = [{"id": "a", "frames": 49, "height": 480, "width": 832, "text_tokens": 512},
         {"id": "b", "frames": 17, "height": 480, "width": 832, "text_tokens": 512}]  # fmt: skip


@dataclass(frozen=True)
class Seen:
    waits: list[tuple[str, str]]  # thread, and what
    peak: int  # bytes
    planned: float  # GiB
    operations: int


def step(folder: Path, ulysses: int, recompute: bool) -> Seen:
    """Two steps on rank 0; the second is watched."""
    device = fake_device.register(0, RANKS)
    text = (
        f"partition{{policy=equal-token}},annotate,assign{{degrees=[{RANKS}]}},place,"
        f"regrid{{ulysses=[{ulysses}]}},bucket,lower,check"
    )
    (folder / "model.py").write_text(MODEL)
    (folder / "clips.jsonl").write_text("".join(json.dumps(clip) + "\n" for clip in CLIPS))
    compiled = compile(
        folder / "model.py", folder / "clips.jsonl", f"1x{RANKS}:h100-80g",
        passes=Pipeline.parse(text, load_file(PASSES, installed())),
    )  # fmt: skip
    module, model_file, clips = compiled.module, compiled.model_file, compiled.manifest.clips
    with torch.device("meta"):
        model = model_file.build()
    sequence = Sequences(model_file, model, clips, torch.bfloat16).for_program(module)
    device.move(model)
    parameters = trained_parameters(model)
    keep_gradients(parameters, module)
    training = Training(dtype="bf16")
    threads = RankThreads(batches=ThreadPoolExecutor(1, "batches", initializer=device.used().__enter__))
    runtime = DeviceRuntime.of(device.device)
    with device.used():
        context = RankContext(
            rank=0, runtime=runtime, model_file=model_file, model=model, parameters=parameters, encoders={},
            sequence=sequence, optimizer=Optimizer(parameters, training), groups=ProcessGroups(),
            gradient_groups=ProcessGroups(), connections=HandoffConnections(), threads=threads,
            loads=LoadAhead(threads.loads, {}, runtime), training=training,
        )  # fmt: skip
        context.groups.ensure(wanted_groups(module))
        context.gradient_groups.ensure(wanted_gradient_groups(module), device=device.device)
        for number in range(2):
            iteration = Iteration.of(module, 0, dict(enumerate(clips)), {}, number)
            with device.watched() as waits:
                waits.seen.clear()
                run_iteration(context, iteration, Clock(0, runtime))
    threads.close()
    planned = max(usage.total - usage.communicators for usage in usages(Values(module), program_of(module, 0)))
    return Seen(waits.seen, device.memory.peak, planned, 0)
