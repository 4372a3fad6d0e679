"""Faults injected into one running job under torchrun, and what each cost: steps lost, seconds until the next step.

A small model on two gloo ranks. Ranks are killed (SIGKILL) and stopped (SIGSTOP) at random steps; torchrun starts them
again. At the end a file of the newest checkpoint is damaged and the job is resumed. All losses are compared with those
of an undisturbed run, and the audit log with the manifest.

    python -m benchmarks.trust.faults --faults KILL,KILL,STOP,KILL -o benchmarks/results/faults.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.trust.small_model import BLOCKS

WORKER = "arachnec.backends.torch_distributed.worker"
EVERY = 20  # steps between checkpoints
APART = 100  # steps between faults
STEP = re.compile(r"^step +(\d+)  loss ([\d.]+)")
MODEL = f"""{BLOCKS}

def build():
    return Small()


def sample(clip, generator):
    noise = noise_of(clip, generator)
    return {{"x": noise}}, noise.roll(1, 1)
"""
CLIPS = [
    {"id": f"clip-{n}", "frames": 1 + n % 3, "height": 16, "width": 16, "text_tokens": 0, "iteration": i}
    for i, batch in enumerate(((0, 1, 2), (3, 4), (5, 6, 7, 8)))
    for n in batch
]


def compiled(folder: Path) -> Path:
    (folder / "model.py").write_text(MODEL)
    (folder / "clips.jsonl").write_text("".join(json.dumps(clip) + "\n" for clip in CLIPS))
    command = [
        "-m",
        "arachnec.cli",
        "compile",
        "model.py",
        "--data",
        "clips.jsonl",
        "--cluster",
        "2:cpu",
        "-o",
        "build",
    ]
    subprocess.run([sys.executable, *command], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder / "build"


def started(build: Path, log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--max-restarts=9", "--rdzv-backend=c10d"]
    command = [sys.executable, *torchrun, "--rdzv-endpoint=localhost:0", "--rdzv-id=faults", "-m", WORKER, str(build)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with log.open("wb") as output:
        return subprocess.Popen(
            [*command, *arguments], stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )


def steps_in(log: Path) -> list[tuple[int, float]]:
    matches = (STEP.match(line) for line in log.read_text(errors="replace").splitlines())
    return [(int(match[1]), float(match[2])) for match in matches if match]


def rank_process(job: int, rank: int) -> int:
    """The process of a rank among the children of this job."""
    children = Path(f"/proc/{job}/task/{job}/children").read_text().split()
    return next(int(c) for c in children if f"\0RANK={rank}\0" in "\0" + Path(f"/proc/{c}/environ").read_text())


def wait_for(job: subprocess.Popen[bytes], log: Path, seen: int, step: int) -> list[tuple[int, float]]:
    """Until, behind the first ``seen`` lines of steps, one of at least ``step`` is there."""
    while job.poll() is None:
        steps = steps_in(log)
        if any(number >= step for number, _ in steps[seen:]):
            return steps
        time.sleep(0.05)
    raise SystemExit(log.read_text(errors="replace")[-4000:])


def disturbed(build: Path, folder: Path, faults: list[str], rng: random.Random) -> tuple[list[dict[str, Any]], Path]:
    log, kept = folder / "disturbed.log", folder / "kept"
    total = APART * (len(faults) + 1)
    job = started(build, log, "--steps", str(total), "--checkpoint", str(kept), "--every", str(EVERY))
    rows, seen = [], 0
    for number, fault in enumerate(faults):
        steps = wait_for(job, log, seen, APART * number + rng.randrange(APART // 2, APART))
        rank = rng.randrange(2)
        began = time.monotonic()
        os.kill(rank_process(job.pid, rank), getattr(signal, f"SIG{fault}"))
        back = 0
        while not back:
            assert job.poll() is None, log.read_text()[-4000:]
            time.sleep(0.05)
            after = steps_in(log)
            back = next((i for i in range(len(steps), len(after)) if after[i][0] <= after[i - 1][0]), 0)
        last, first = after[back - 1][0], after[back][0]
        row = {"fault": fault, "rank": rank, "step": last, "lost": last + 1 - first}
        rows.append({**row, "seconds": round(time.monotonic() - began, 1)})
        print(rows[-1], flush=True)
        seen = len(after)
    job.wait()
    assert job.returncode == 0, log.read_text()[-4000:]
    return rows, log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", default="KILL,STOP,KILL")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path)
    given = parser.parse_args()
    faults = given.faults.split(",")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        build = compiled(folder)
        rows, log = disturbed(build, folder, faults, random.Random(given.seed))
        kept = folder / "kept"
        newest = max(kept.glob("step-*"))
        file = next(newest.glob("*.safetensors"))
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        again = folder / "again.log"
        total = APART * (len(faults) + 1)
        job = started(build, again, "--more", str(2 * EVERY), "--checkpoint", str(kept), "--resume")
        assert job.wait() == 0, again.read_text()[-4000:]
        rows.append({"fault": "a damaged checkpoint", "lost": total - steps_in(again)[0][0]})
        plain = folder / "plain.log"
        job = started(build, plain, "--steps", str(total + EVERY))
        assert job.wait() == 0, plain.read_text()[-4000:]
        losses = dict(steps_in(plain))
        differences = [abs(loss - losses[step]) for step, loss in (*steps_in(log), *steps_in(again))]
        epochs = [
            [json.loads(line) for line in file.read_text().splitlines()]
            for file in sorted((kept / "audit").glob("epoch-*.jsonl"))
        ]
        once = Counter(clip["id"] for clip in CLIPS)
        whole = [
            Counter(clip for line in epoch for clip in line["trained"]) == once for epoch in epochs if len(epoch) == 3
        ]
        result = {
            "faults": rows,
            "resumed": len(rows),
            "steps": total + EVERY,
            "largest difference of a loss": max(differences),
            "epochs with every clip once": f"{sum(whole)} of {len(whole)}",
        }
    print(json.dumps(result, indent=2))
    if given.output:
        given.output.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
