"""The executor's pipelines beside torch.distributed.pipelining: the same model, stages, micro-batches and schedule.

    python -m benchmarks.pipelines.peers_on_gloo [--schedule 1f1b|gpipe|zb-h1|interleaved-1f1b] [--steps 10] [--json FILE]

Two gloo ranks with one thread each run both in the same processes and take turns, step by step, both with AdamW. The
model is that of examples/plain_dit.py without its clips of other lengths: torch's schedules take equal micro-batches
only. torch's stages are that model's own forward, cut by hand where ours is cut; what a stage needs of the time and the
caption it is handed, as here. Its batches are made before the clock starts; ours, in a thread beside, within the step.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn

ROOT = Path(__file__).parents[2]
RANKS = 2
PASSES = "stages{{cuts={cuts}}},partition{{policy=single}},annotate,schedule-pipeline{{schedule={schedule}}},lower,check"
CUTS = {"interleaved-1f1b": (1, 3, 5)}  # of six blocks; else in the middle
TORCH = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "zb-h1": "ScheduleInterleavedZeroBubble",
    "interleaved-1f1b": "ScheduleInterleaved1F1B",
}


class Part(nn.Module):
    """Blocks of the model, with its embeddings if they are the first and its head if they are the last."""

    def __init__(self, model: Any, begin: int, end: int, grid: tuple[int, int, int], table: Any) -> None:
        super().__init__()
        self.blocks = model.blocks[begin:end]
        self.grid, self.table, self.width, self.head_width = grid, table, model.width, model.head_width
        self.first, self.last = begin == 0, end == len(model.blocks)
        if self.first:
            self.embed, self.text, self.time = model.embed, model.text, model.time
        if self.last:
            self.norm, self.head = model.norm, model.head

    def forward(self, x: Tensor, text: Tensor, time: Tensor) -> Any:
        if self.first:
            frames, height, width = self.grid
            x = x.unflatten(4, (width, 2)).unflatten(3, (height, 2))
            x = self.embed(x.permute(0, 2, 3, 5, 1, 4, 6).flatten(4).flatten(1, 3))
            time, text = self.time(self.table.sinusoid(1000 * time, self.width)), self.text(text)
        rotary = self.table.rotary_table(self.grid, self.head_width, x.device)
        for block in self.blocks:
            x = block(x, text, time, rotary)
        if not self.last:
            return x, text, time
        x = self.head(self.norm(x)).view(len(x), *self.grid, 8, 2, 2)
        return x.permute(0, 4, 1, 2, 5, 3, 6).flatten(5, 6).flatten(3, 4)


def peer(executable: Any, schedule: str, cuts: tuple[int, ...], rank: int) -> Any:
    """One step of torch's pipeline as a function of the step's number; it returns the loss on the last rank."""
    from torch.distributed import pipelining

    from arachnec.models.batch import make_batch

    model_file = executable.model_file()
    torch.manual_seed(0)
    model = model_file.build()
    arguments, _ = make_batch(model_file, [executable.clips[0]], 0, 0, "cpu")
    latents = arguments["latents"]
    grid = (latents.shape[2], latents.shape[3] // 2, latents.shape[4] // 2)
    bounds = [0, *cuts, len(model.blocks)]
    numbers = range(rank, len(bounds) - 1, RANKS)
    import sys

    parts = [Part(model, bounds[n], bounds[n + 1], grid, sys.modules[type(model).__module__]) for n in numbers]
    stages = [
        pipelining.PipelineStage(part, number, len(bounds) - 1, torch.device("cpu"))
        for part, number in zip(parts, numbers, strict=True)
    ]
    count = len(executable.clips)
    kind = getattr(pipelining, TORCH[schedule])
    several = "Interleaved" in TORCH[schedule]
    runner = kind(stages if several else stages[0], count, loss_fn=nn.functional.mse_loss)
    adam = torch.optim.AdamW([p for part in parts for p in part.parameters()], lr=1e-4)

    def prepared(step: int) -> tuple[tuple[Tensor, ...], Tensor]:
        batches = [make_batch(model_file, [clip], 0, step, "cpu") for clip in executable.clips]
        given = tuple(torch.cat([a[name] for a, _ in batches]) for name in ("latents", "caption", "t"))
        return given, torch.cat([target for _, target in batches])

    def run(given: tuple[Tensor, ...], target: Tensor) -> float:
        adam.zero_grad()
        losses: list[Tensor] = []
        first, last = rank == 0, (len(bounds) - 2) in numbers
        runner.step(*(given if first else ()), **({"target": target, "losses": losses} if last else {}))
        torch.nn.utils.clip_grad_norm_([p for part in parts for p in part.parameters()], 1.0)
        adam.step()
        return float(torch.stack(losses).mean()) if losses else 0.0

    return prepared, run


def compare(rank: int, folder: str, schedule: str, cuts: tuple[int, ...], steps: int) -> None:
    from arachnec.backends.torch_distributed.options import RunOptions
    from arachnec.backends.torch_distributed.training_run import Trainer
    from arachnec.executable.folder import read_executable

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    executable = read_executable(Path(folder) / "build")
    trainer = Trainer(executable, RunOptions(), torch.device("cpu"))
    prepared, run = peer(executable, schedule, cuts, rank)
    rows: dict[str, list[tuple[float, float]]] = {"ours": [], "torch": []}
    losses: dict[str, list[float]] = {"ours": [], "torch": []}
    for step in range(steps + 2):
        given, target = prepared(step)
        for name in ("ours", "torch") if step % 2 else ("torch", "ours"):
            dist.barrier()
            began, worked = time.perf_counter(), time.process_time()
            loss = trainer.step(step).loss if name == "ours" else run(given, target)
            dist.barrier()
            rows[name].append(((time.perf_counter() - began) * 1e3, (time.process_time() - worked) * 1e3))
            losses[name].append(loss)
    trainer.close()
    summary = {
        name: {
            "step_ms": statistics.median(wall for wall, _ in of[2:]),
            "cpu_ms": statistics.median(cpu for _, cpu in of[2:]),
            "first_loss": losses[name][0],
        }
        for name, of in rows.items()
    }
    (Path(folder) / f"rank{rank}.json").write_text(json.dumps(summary))
    dist.destroy_process_group()


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--schedule", type=click.Choice(list(TORCH)), default="1f1b")
@click.option("--micro-batches", type=int, default=8)
@click.option("--steps", type=int, default=10)
@click.option("--json", "place", type=click.Path(path_type=Path))
def main(schedule: str, micro_batches: int, steps: int, place: Path | None) -> None:
    from arachnec.driver import compile as compile_model

    cuts = CUTS.get(schedule, (3,))
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        clips = Path(folder) / "clips.jsonl"
        row = json.dumps({"frames": 33, "height": 96, "width": 160, "text_tokens": 96})
        clips.write_text("".join(f"{row}\n" for _ in range(micro_batches)))
        passes = PASSES.format(cuts="[" + ",".join(map(str, cuts)) + "]", schedule=schedule)
        model = ROOT / "examples" / "plain_dit.py"
        compile_model(model, clips, f"{RANKS}:cpu", passes=passes).write(Path(folder) / "build")
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=compare, args=(r, folder, schedule, cuts, steps)) for r in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        found = [json.loads((Path(folder) / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
    result: dict[str, Any] = {
        name: {key: max(row[name][key] for row in found) for key in found[0][name]} for name in found[0]
    }
    result |= {"schedule": schedule, "ratio": result["ours"]["step_ms"] / result["torch"]["step_ms"]}
    if place is not None:
        place.write_text(json.dumps(result, indent=2) + "\n")
    for name in ("ours", "torch"):
        print(f"{name:6} {result[name]['step_ms']:8.1f} ms a step, {result[name]['cpu_ms']:8.1f} ms of a core")
    print(f"{schedule}, {micro_batches} micro-batches: ours / torch {result['ratio']:.3f}")
    print(f"first losses: {result['ours']['first_loss']:.6f}, {result['torch']['first_loss']:.6f}")


if __name__ == "__main__":
    main()
