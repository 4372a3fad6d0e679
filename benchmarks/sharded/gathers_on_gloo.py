"""Measured steps on gloo ranks whose optimizer is dealt out: updates gathered behind the first layers, or waited for.

One run of ``benchmarks/models/updates_gathered.py``. In every other step a rank waits for all gathers where it has
started them, as if the step before had ended with them; in the rest each layer waits for its own. Both kinds of step do
the same otherwise, and losses do not depend on it. To be run on an idle machine::

    python benchmarks/sharded/gathers_on_gloo.py --ranks 2 --steps 40

Prints the median step of both kinds, their ratio, and the ms that ranks stood still for gathers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.backends.torch_distributed.run.training_run import Trainer
from arachnec.executable.folder import read_executable
from arachnec.model_state.parameter_parts import GatheredParts
from arachnec.model_state.updated_parameters import UpdatedParameters

MODEL = Path(__file__).parents[1] / "models" / "updates_gathered.py"
CLUSTER = """nodes = 1
gpus = {ranks}
device = "cpu"
memory = "{memory} GiB"
"""
MEMORY = 1.5  # so little that `shard-optimizer` deals the state out


def rank(number: int, ranks: int, folder: str, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=ranks)
    trainer = Trainer(read_executable(Path(folder) / "build"), RunOptions(), torch.device("cpu"))
    start, arrive, stood = UpdatedParameters.start, GatheredParts.wait, [0.0]
    waits_at_once = [False]

    def started(self: UpdatedParameters, *arguments: object) -> None:
        start(self, *arguments)  # type: ignore[arg-type]
        if waits_at_once[0]:
            for layer in list(self._coming):
                self._wait(layer)

    def arrived(self: GatheredParts) -> None:
        begun = time.perf_counter()
        self.work.wait()
        stood[0] += (time.perf_counter() - begun) * 1e3
        arrive(self)

    UpdatedParameters.start, GatheredParts.wait = started, arrived  # type: ignore[method-assign]
    rows: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for step in range(steps + 2):
        waits_at_once[0], stood[0] = bool(step % 2), 0.0
        report = trainer.step(step)
        if step >= 2:
            rows[waits_at_once[0]].append((report.step_ms, stood[0]))
    trainer.close()
    if number == 0:
        (Path(folder) / "rows.json").write_text(json.dumps([rows[True], rows[False]]))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--clips", type=int, default=2, help="of 256 tokens, in each step")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cluster.toml").write_text(CLUSTER.format(ranks=options.ranks, memory=MEMORY))
        clips = [
            {"id": str(n), "frames": 1, "height": 128, "width": 128, "text_tokens": 0} for n in range(options.clips)
        ]
        (folder / "clips.jsonl").write_text("".join(json.dumps(clip) + "\n" for clip in clips))
        build = ["compile", MODEL, "--data", folder / "clips.jsonl", "--cluster", folder / "cluster.toml"]
        command = [sys.executable, "-m", "arachnec", *map(str, build), "-o", str(folder / "build")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        assert "gather @" in (folder / "build" / "program.cascade").read_text(), "the optimizer is not dealt out"
        mp.spawn(rank, (options.ranks, name, options.steps), options.ranks)
        waiting, behind = json.loads((folder / "rows.json").read_text())
    print(f"{options.ranks} gloo ranks, {options.clips} clips, {len(waiting)} steps of each kind in turn")
    for what, rows in (("waits for all gathers at once", waiting), ("each layer waits for its own", behind)):
        steps, stood = (statistics.median(row[column] for row in rows) for column in (0, 1))
        print(f"  {what:30s} step {steps:8.1f} ms   of that stood still {stood:7.1f} ms on rank 0")
    ratio = statistics.median(row[0] for row in behind) / statistics.median(row[0] for row in waiting)
    print(f"  ratio of the medians {ratio:.3f}")


if __name__ == "__main__":
    main()
