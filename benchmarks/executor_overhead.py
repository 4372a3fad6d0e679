"""What the executor costs over a hand-written loop that runs the same cascades in the same order on one rank.

    python benchmarks/executor_overhead.py [MODEL --data CLIPS] [--steps 20] [--json]

Both train the same model on the same micro-batches with the same optimizer, in this process, taking turns. The
executor's step is everything between two steps of a run: walking the program, its measurements, the report.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.backends.torch_distributed.run.training_run import Trainer
from arachnec.driver import compile as compile_model
from arachnec.executable.folder import Executable, read_executable
from arachnec.models.batch import clip_generator

ROOT = Path(__file__).parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, default=ROOT / "examples" / "plain_dit.py")
    parser.add_argument("--data", type=Path, default=ROOT / "examples" / "clips_small.jsonl")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        compile_model(arguments.model, arguments.data, "1:cpu").write(Path(folder) / "build")
        executable = read_executable(Path(folder) / "build")
        store = dist.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        result = compare(executable, arguments.steps)
        dist.destroy_process_group()
    print(json.dumps(result, indent=2) if arguments.json else summary(result))


def compare(executable: Executable, steps: int) -> dict[str, float]:
    trainer = Trainer(executable, RunOptions(), torch.device("cpu"))
    by_hand = hand_written(executable)
    times: dict[str, list[float]] = {"executor": [], "by hand": []}
    work: dict[str, list[float]] = {"executor": [], "by hand": []}
    losses: dict[str, list[float]] = {"executor": [], "by hand": []}
    runs: dict[str, Callable[[int], float]] = {"executor": lambda step: trainer.step(step).loss, "by hand": by_hand}
    for step in range(steps + 2):
        for name in sorted(runs, reverse=bool(step % 2)):
            started, worked = time.perf_counter(), time.process_time()
            losses[name].append(runs[name](step))
            work[name].append((time.process_time() - worked) * 1e3)
            times[name].append((time.perf_counter() - started) * 1e3)
    trainer.close()
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses["executor"], losses["by hand"], strict=True))
    if apart > 1e-4:
        raise SystemExit(f"the two loops do not train alike: losses differ by {apart:.1e}")
    executor, hand = (statistics.median(times[name][2:]) for name in ("executor", "by hand"))
    return {
        "executor_ms": executor,
        "by_hand_ms": hand,
        "overhead": _median_ratio(times) - 1,
        "overhead_cpu": _median_ratio(work) - 1,
        "steps": steps,
    }


def _median_ratio(times: dict[str, list[float]]) -> float:
    """Of each step of the executor to the hand-written one beside it, the first two left out."""
    return statistics.median(a / b for a, b in zip(times["executor"][2:], times["by hand"][2:], strict=True))


def hand_written(executable: Executable) -> Callable[[int], float]:
    """A training step in plain PyTorch, over the cascades of the program in its order."""
    model_file = executable.model_file()
    seed = executable.training.seed
    torch.manual_seed(seed)
    model = model_file.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=executable.training.lr, betas=(0.9, 0.95), weight_decay=0.01)
    cascades = {cascade.name: cascade for cascade in executable.program.cascades}
    order = [i.target for i in executable.program.programs[0].instructions if i.op == "forward"]
    batches = [[executable.clips[clip] for clip in cascades[name].clips] for name in order]
    count = len(executable.program.clips)

    def step(number: int) -> float:
        total = 0.0
        for batch in batches:
            samples = [
                model_file.sample(clip, clip_generator(executable.training.seed, number, clip.id)) for clip in batch
            ]
            kwargs = {
                name: torch.cat([given[name] for given, _ in samples])
                if isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == 1
                else value
                for name, value in samples[0][0].items()
            }
            loss = model_file.loss(model(**kwargs), torch.cat([target for _, target in samples])) * len(batch) / count
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), executable.training.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def summary(result: dict[str, float]) -> str:
    return (
        f"median of {result['steps']:.0f} steps: executor {result['executor_ms']:.1f} ms, "
        f"by hand {result['by_hand_ms']:.1f} ms; of pairs, overhead {100 * result['overhead']:+.1f} % of wall time, "
        f"{100 * result['overhead_cpu']:+.1f} % of processor time"
    )


if __name__ == "__main__":
    main()
