"""Runs whose launcher is killed between checkpoints, with each option that a checkpoint keeps something for.

An average of the weights, a validation manifest, a mix of manifests, accumulation, predictors of sparse layers; and
none. Two gloo ranks under ``arachnec run``. Twice SIGKILL to the launcher, then ``--resume``, at last on one rank.
All losses and validation losses, and the tensors of the last checkpoint, are held to those of an undisturbed run.
Then the same folder is resumed with what makes it another run, which must be refused.

    python -m benchmarks.trust.resumed_options -o benchmarks/results/resumed_options.json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from arachnec.checkpoint.folder import committed, read_commit
from tests.distributed.executor_cases import MODEL, RUNS
from tests.warm_python import warm_python

EVERY, STEPS = 4, 18
# Far above rounding: a bias of keys has no gradient, as softmax does not see it, and Adam would divide noise by noise.
EPS = "optimizer.eps=1e-4"
SLOWLY = """

plain_sample = sample


def sample(clip, generator):
    import time

    time.sleep(0.05)
    return plain_sample(clip, generator)
"""
MIX = """
[mix]
batch = 3
[[mix.manifests]]
data = "clips.jsonl"
weight = 2
[[mix.manifests]]
data = "held.jsonl"
"""
VALIDATION = """
[validation]
data = "held.jsonl"
every = 3
"""
SPARSE = "sparsify{density=0.2,group=16,block=1,rank=4,overhead=0ms}"


@dataclass(frozen=True)
class Case:
    """``train`` is a file of options; ``others`` are settings at ``run`` that make it another run."""

    train: str = ""
    sparse: bool = False
    others: tuple[str, ...] = ()


CASES = {
    "plain": Case(others=("seed=5",)),
    "ema": Case("ema = 0.9\n", others=("seed=5",)),
    "validation": Case(VALIDATION),
    "mix": Case(MIX, others=("seed=5",)),
    "accumulate": Case("accumulate = 2\n", others=("accumulate=1", "accumulate=3")),
    "sparse": Case(sparse=True),
}


def rows(name: str, count: int, batches: bool) -> str:
    clips = [
        {"id": f"{name}-{n}", "frames": 9 + 4 * (n % 3), "height": 16, "width": 16, "text_tokens": 0}
        | ({"iteration": n // 3} if batches else {})
        for n in range(count)
    ]
    return "".join(json.dumps(clip) + "\n" for clip in clips)


def arachnec(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [warm_python(RUNS), "-m", "arachnec.cli", *words],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment,
    )  # fmt: skip


def ended(job: subprocess.Popen[bytes]) -> tuple[int, str]:
    said, _ = job.communicate(timeout=300)
    return job.returncode, said.decode(errors="replace")


def demanded(job: subprocess.Popen[bytes]) -> str:
    code, said = ended(job)
    if code:
        raise SystemExit(said[-3000:])
    return said


def compiled(folder: Path, case: Case, build: str) -> None:
    words = ["compile", "model.py", "--cluster", "2:cpu", "-o", build, "--set", "lr=0.01", "--set", EPS]
    if "mix" not in case.train:
        words += ["--data", "clips.jsonl"]
    if case.train:
        words += ["--train", "train.toml"]
    if case.sparse:
        words += [
            "--passes",
            f"{SPARSE},partition{{policy=single}},annotate,schedule-static{{degree=2}},place,bucket,lower",
        ]
    demanded(arachnec(folder, *words))


def seen(log: Path) -> list[dict[str, Any]]:
    whole = log.read_text().splitlines() if log.exists() else []
    return [json.loads(line) for line in whole if line.endswith("}")]


def run(folder: Path, log: str, kept: str, *more: str) -> subprocess.Popen[bytes]:
    options = ["--checkpoint", kept, "--every", str(EVERY), "--set", f"logging.jsonl={log}", *more]
    return arachnec(folder, "run", "build", "--no-equivalence", *options)


def tensors(folder: Path) -> dict[str, list[float]]:
    """The elements of every tensor of the newest checkpoint, put together from the files of its ranks."""
    path = committed(folder)[0]
    whole: dict[str, list[float]] = {}
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as stored:
            places = json.loads(stored.metadata()["runs"])
            for name in stored.keys():  # noqa: SIM118
                first, size = places[name]
                values = stored.get_tensor(name).double().flatten().tolist()
                whole.setdefault(name, [0.0] * size)[first : first + len(values)] = values
    return whole


def apart(ours: list[float], right: list[float]) -> float:
    norm = sum(value**2 for value in right) ** 0.5
    return sum((a - b) ** 2 for a, b in zip(ours, right, strict=True)) ** 0.5 / max(norm, 1e-6)


def judged(name: str, folder: Path, rng: random.Random) -> dict[str, Any]:
    case = CASES[name]
    (folder / "model.py").write_text(MODEL + SLOWLY)
    (folder / "train.toml").write_text(case.train)
    (folder / "clips.jsonl").write_text(rows("clip", 9, name != "mix"))
    (folder / "held.jsonl").write_text(rows("held", 3, False))
    compiled(folder, case, "build")
    demanded(run(folder, "right.jsonl", "right", "--steps", str(STEPS)))
    killed = []
    for _ in range(2):
        done = max((row["step"] for row in seen(folder / "log.jsonl")), default=-1)
        until = done + rng.randint(EVERY + 1, EVERY + 3)
        job = run(folder, "log.jsonl", "kept", "--steps", str(STEPS), "--resume")
        begun = time.monotonic()
        while max((row["step"] for row in seen(folder / "log.jsonl")), default=-1) < until:
            if job.poll() is not None or time.monotonic() - begun > 240:
                raise SystemExit(ended(job)[1][-3000:])
            time.sleep(0.02)
        job.send_signal(signal.SIGKILL)
        ended(job)
        killed.append({"after": seen(folder / "log.jsonl")[-1]["step"], "whole": whole_steps(folder)})
    demanded(run(folder, "log.jsonl", "kept", "--steps", str(STEPS), "--resume", "--ranks", "1"))
    right = {row["step"]: row for row in seen(folder / "right.jsonl")}
    took = seen(folder / "log.jsonl")
    losses = max(abs(row["loss"] - right[row["step"]]["loss"]) / abs(right[row["step"]]["loss"]) for row in took)
    checked = [row for row in took if row.get("validation_loss") is not None]
    validation = max((abs(r["validation_loss"] - right[r["step"]]["validation_loss"]) for r in checked), default=None)
    ours, expected = tensors(folder / "kept"), tensors(folder / "right")
    worst = max((apart(ours[tensor], expected[tensor]), tensor) for tensor in expected)
    commit, other = read_commit(committed(folder / "kept")[0]), read_commit(committed(folder / "right")[0])
    assert commit is not None and other is not None
    return {
        "killed": killed, "steps": len(took), "taken twice": len(took) - len({row["step"] for row in took}),
        "every step": sorted({row["step"] for row in took}) == list(range(STEPS)), "loss apart": losses,
        "validation apart": validation, "same tensors": ours.keys() == expected.keys(), "tensor apart": worst,
        "same position": commit.position == other.position, "clips": commit.position.clips,
        "not refused": not_refused(folder, case, name),
    }  # fmt: skip


def whole_steps(folder: Path) -> int:
    commit = read_commit(committed(folder / "kept")[0])
    assert commit is not None
    return commit.position.steps


def not_refused(folder: Path, case: Case, name: str) -> list[str]:
    """What makes this another run and was taken all the same; a traceback too."""
    taken = []

    def demand(what: str, *more: str) -> None:
        code, said = ended(run(folder, "other.jsonl", "kept", "--more", "1", "--resume", *more))
        if code != 2 or "Traceback" in said or "does not fit this run" not in said:
            taken.append(f"{what}: {code} {said[-300:]}")

    for setting in case.others:
        demand(setting, "--set", setting)
    shutil.move(folder / "build", folder / "first")
    for what, clips, batches in (("another manifest", 8, True), ("other batches", 9, False)):
        (folder / "clips.jsonl").write_text(rows("clip", clips, batches and name != "mix"))
        if name == "mix" and what == "other batches":
            (folder / "clips.jsonl").write_text(rows("clip", 9, False))
            (folder / "train.toml").write_text(case.train.replace("batch = 3", "batch = 2"))
        shutil.rmtree(folder / "build", ignore_errors=True)
        compiled(folder, case, "build")
        demand(what)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {"seed": options.seed, "cases": {}}
    if options.output and options.output.exists():  # goes on where it was stopped
        earlier = json.loads(options.output.read_text())
        result = earlier if earlier["seed"] == options.seed else result
    for name in options.cases.split(","):
        if name in result["cases"]:
            continue
        with tempfile.TemporaryDirectory(prefix="arachnec-resumed-") as folder:
            result["cases"][name] = judged(name, Path(folder), random.Random(f"{options.seed}/{name}"))
        print(name, json.dumps(result["cases"][name]), flush=True)
        if options.output:
            options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
