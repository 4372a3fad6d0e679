"""Jobs of a small model, disturbed at random times until the given seconds are over. After every fault the job is
started again with ``--resume``, and after every job is checked:

* each loss, of steps done twice too, is that of an undisturbed run (1e-6 of it);
* the audit log has every clip of the manifest once in every epoch, trained or set aside by its name;
* no process of the job is left, no file in the folder for temporary ones, in shared memory or beside the checkpoints.

Two gloo ranks and their planner, under ``arachnec run`` or torchrun. Every clip is a file that an encoder reads; in
some jobs one of them is missing. As root every job has temporary files, shared memory and a disk of a few MiB for its
checkpoints of its own, so that nothing of other programs counts; else the last two are left out.

    python -m benchmarks.trust.random_faults --seconds 3600 --seed 1 -o benchmarks/results/random_faults.json
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arachnec.checkpoint.folder import committed, is_intact, read_commit
from arachnec.launch.local_ranks import is_stopped
from benchmarks.trust.small_model import BLOCKS

WORKER = "arachnec.backends.torch_distributed.worker"
MARK = "ARACHNEC_RANDOM_FAULTS"  # in the environment of every process of a job
STEPS = 240  # most of a job
EVERY = 10  # steps between checkpoints
TOLERANCE = 1e-6
GONE_S = 40.0  # until all processes of a job that was broken are to be gone
ENDS_S = 120.0  # until a run that a fault broke is to have ended
DISK = "4m"
SHARED = "/dev/shm"
# what follows runs with the folder $0 in its place, and as the same process
OWN_MEMORY = ("unshare", "--mount", "--propagation", "private", "sh", "-c", f'mount --bind "$0" {SHARED} && exec "$@"')
# of torch and ours, one a user, made when it is imported; torchrun leaves a folder of logs at every start
CACHES = ("arachnec-", "torchinductor_", "torchelastic_")
MODEL = (
    BLOCKS
    + """

class File(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Linear(1, 16)

    def load(self, clip, device):
        tokens = clip.frames * (clip.height // 8) * (clip.width // 8)
        if device.type == "meta":
            return torch.empty(1, tokens, 1, device=device)
        return torch.full((1, tokens, 1), float(open(clip.path).read()))

    def forward(self, loaded):
        return torch.tanh(self.scale(loaded))


def build():
    return Small(0.04)


def encoders():
    return {"file": File()}


def sample(clip, generator):
    noise = noise_of(clip, generator)
    return {"x": noise + clip.encoded["file"]}, noise.roll(1, 1)
"""
)
BATCHES = ((0, 1, 2), (3, 4), (5, 6, 7, 8))
CLIPS = [
    {"id": f"clip-{n}", "frames": 1 + n % 3, "height": 16, "width": 16, "text_tokens": 0, "iteration": i,
     "path": f"clips/{n}.txt"}
    for i, batch in enumerate(BATCHES)
    for n in batch
]  # fmt: skip
MISSING = "clip-6"  # in some jobs
SIGNALS = ("SIGKILL", "SIGTERM", "SIGHUP", "SIGINT")


@dataclass
class Job:
    """One folder with an executable, its checkpoints and what it is to compute."""

    folder: Path
    missing: bool = False
    total: int = STEPS
    torchrun: bool = False
    isolated: bool = False  # has shared memory of its own
    starts: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def kept(self) -> Path:
        return self.folder / "disk" / "kept"

    @property
    def losses(self) -> Path:
        return self.folder / "losses.jsonl"

    @property
    def log(self) -> Path:
        return self.folder / f"start-{self.starts}.log"


def prepare(folder: Path) -> None:
    """The executable in this folder, and the files of its clips."""
    (folder / "clips").mkdir(parents=True)
    (folder / "disk").mkdir()
    (folder / "tmp").mkdir()
    (folder / "shm").mkdir()
    for number in range(len(CLIPS)):
        (folder / "clips" / f"{number}.txt").write_text(str(number / 10))
    (folder / "model.py").write_text(MODEL)
    (folder / "clips.jsonl").write_text("".join(json.dumps(clip) + "\n" for clip in CLIPS))
    command = ["compile", "model.py", "--data", "clips.jsonl", "--cluster", "2:cpu", "-o", "build"]
    subprocess.run([sys.executable, "-m", "arachnec", *command], cwd=folder, check=True, stdout=subprocess.DEVNULL)


def start(job: Job, steps: int, *, resume: bool = True) -> subprocess.Popen[bytes]:
    job.starts += 1
    options = ["--steps", str(steps), "--set", f"logging.jsonl={job.losses}"]
    options += ["--checkpoint", str(job.kept), "--every", str(EVERY)] if resume else []
    options += ["--resume"] if resume else []
    elastic = ["--nproc-per-node=2", "--max-restarts=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    if job.torchrun:
        named = f"--rdzv-id=job-{job.starts}"
        command = ["-m", "torch.distributed.run", *elastic, named, "-m", WORKER, "build", *options]
    else:
        command = ["-m", "arachnec", "run", "build", "--no-equivalence", *options]
    memory = [*OWN_MEMORY, str(job.folder / "shm")] if job.isolated else []
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", MARK: str(job.folder),
        "TMPDIR": str(job.folder / "tmp"),
    }  # fmt: skip
    with job.log.open("wb") as output:
        return subprocess.Popen(
            [*memory, sys.executable, *command], cwd=job.folder, stdout=output, stderr=subprocess.STDOUT,
            env=environment, start_new_session=True,
        )  # fmt: skip


def marked(job: Job) -> dict[int, str]:
    """The living processes of this job, with their command lines."""
    mine = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={job.folder}\0" in (place / "environ").read_text(errors="replace"):
                words = (place / "cmdline").read_text(errors="replace").split("\0")
                mine[int(place.name)] = " ".join(word.rpartition("/")[2] for word in words).strip()
        except OSError:
            continue
    return mine


def ranks(job: Job) -> list[int]:
    """The workers that have a rank in their environment: torchrun itself has a worker in its command alone."""
    workers = (pid for pid, line in marked(job).items() if WORKER in line)
    return sorted(pid for pid in workers if "\0RANK=" in _text(Path("/proc") / str(pid) / "environ"))


def _text(place: Path) -> str:
    try:
        return place.read_text(errors="replace")
    except OSError:
        return ""


def send(pid: int, name: str, *, group: bool = False) -> bool:
    try:
        (os.killpg if group else os.kill)(pid, getattr(signal, name))
    except ProcessLookupError:
        return False
    return True


def disturb(job: Job, run: subprocess.Popen[bytes], rng: random.Random) -> tuple[str, bool]:
    """One fault. What it was, and whether the run has to end of it."""
    kind = rng.choice(("rank", "launcher", "launcher", "planner", "ctrl-c", "all", "pause", "stop", "damage", "disk"))
    own = ranks(job)
    if kind == "rank" and own:
        name = rng.choice(("SIGKILL", "SIGKILL", "SIGTERM", "SIGHUP"))
        send(rng.choice(own), name)
        return f"{name} to a rank", not job.torchrun
    if kind == "launcher":
        name = rng.choice(SIGNALS)
        send(run.pid, name)
        return f"{name} to the launcher", True
    if kind == "planner":
        others = sorted(set(marked(job)) - {run.pid, *own})
        if others:
            send(rng.choice(others), "SIGKILL")
            return "SIGKILL to a process of a rank", False
    if kind == "ctrl-c":
        send(run.pid, "SIGINT", group=True)
        return "Ctrl-C", True
    if kind == "all":
        send(run.pid, "SIGKILL", group=True)
        for pid in marked(job):
            send(pid, "SIGKILL")
        return "SIGKILL to all", True
    if kind == "pause" and own:
        rank = rng.choice(own)
        send(rank, "SIGSTOP")
        time.sleep(rng.uniform(0.5, 4.0))
        send(rank, "SIGCONT")
        return "SIGSTOP to a rank, SIGCONT after up to 4 s", False
    if kind == "stop" and own and not any(map(is_stopped, own)):  # the others are to notice it
        send(rng.choice(own), "SIGSTOP")
        return "SIGSTOP to a rank", not job.torchrun
    if kind == "damage" and (told := damage(job.kept, rng)):
        send(run.pid, "SIGKILL", group=True)
        for pid in marked(job):
            send(pid, "SIGKILL")
        return f"{told}, SIGKILL to all", True
    if kind == "disk" and os.path.ismount(job.folder / "disk"):
        fill_disk(job.folder / "disk", rng)
        return "a full disk", False
    return "", False


def damage(kept: Path, rng: random.Random) -> str:
    """Something done to a file of the newest checkpoint; nothing while a run has none."""
    newest = max(kept.glob("step-*"), default=None)
    files = sorted(newest.glob("*")) if newest is not None else []
    if not files:
        return ""
    file = rng.choice(files)
    kind = rng.choice(("flipped", "truncated", "emptied", "deleted", "garbage"))
    try:
        data = bytearray(file.read_bytes())
        if kind == "flipped" and data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind == "truncated":
            data = data[: rng.randrange(len(data) + 1)]
        elif kind == "emptied":
            data = bytearray()
        elif kind == "garbage":
            data = bytearray(rng.randbytes(len(data)))
        if kind == "deleted":
            file.unlink()
        else:
            file.write_bytes(data)
    except OSError:  # pruned, or the disk is full
        return ""
    return f"{'commit.json' if file.name == 'commit.json' else 'a shard'} of the newest checkpoint {kind}"


def fill_disk(disk: Path, rng: random.Random) -> None:
    free = shutil.disk_usage(disk).free
    left = rng.choice((0, rng.randrange(30_000)))
    try:
        with (disk / "filler").open("wb") as file:
            file.write(bytes(max(0, free - left)))
    except OSError:
        pass


def may_isolate(folder: Path) -> bool:
    """Whether a process may have shared memory of its own here."""
    try:
        return subprocess.run([*OWN_MEMORY, str(folder), "true"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def wait_gone(job: Job, seconds: float) -> dict[int, str]:
    """What is still there of the job after so long."""
    end = time.monotonic() + seconds
    while (left := marked(job)) and time.monotonic() < end:
        time.sleep(0.2)
    return left


def newest_done(job: Job) -> int:
    """Steps of the newest checkpoint that is whole."""
    for path in committed(job.kept):
        commit = read_commit(path)
        if commit is not None and all(is_intact(path, record) for record in commit.files):
            return commit.position.steps
    return 0


def one_start(job: Job, rng: random.Random, *, disturbed: bool) -> tuple[list[str], int | None]:
    """The job started once more, up to its total; the faults it got, and how it ended."""
    run = start(job, job.total)
    faults: list[str] = []
    must_end = False
    while disturbed and not must_end and len(faults) < 3 and run.poll() is None:
        if rng.random() < 0.7:  # while steps are taken, else wherever it is
            wait_for_a_step(job, run)
            with_timeout(run, rng.uniform(0.0, 12.0))
        else:
            with_timeout(run, rng.uniform(0.0, 40.0))
        if run.poll() is None:
            fault, must_end = disturb(job, run, rng)
            faults += [fault] if fault else []
    ended = with_timeout(run, ENDS_S if faults else 10 * ENDS_S)
    if ended is None:
        job.problems.append(f"start {job.starts} ({faults}) did not end in {ENDS_S:g} s")
        for pid in marked(job):
            send(pid, "SIGKILL")
        run.wait()
    left = wait_gone(job, GONE_S)
    if left:
        job.problems.append(f"start {job.starts} ({faults}) left {sorted(left.values())}")
        for pid in left:
            send(pid, "SIGKILL")
        wait_gone(job, 5.0)
    (job.folder / "disk" / "filler").unlink(missing_ok=True)
    text = job.log.read_text(errors="replace")
    if not job.torchrun and "Traceback" in text:
        job.problems.append(
            f"start {job.starts} ({faults}) shows a traceback: {text[text.index('Traceback') :][:1500]}"
        )
    if ended not in (0, 2, -9, 129, 130, 143, -15, -1, -2) and not job.torchrun:
        job.problems.append(f"start {job.starts} ({faults}) ended with {ended}: {text[-1500:]}")
    if not faults and ended != 0:
        job.problems.append(f"start {job.starts}, undisturbed, ended with {ended}: {text[-1500:]}")
    return faults, ended


def wait_for_a_step(job: Job, run: subprocess.Popen[bytes]) -> None:
    before = job.losses.stat().st_size if job.losses.exists() else 0
    end = time.monotonic() + ENDS_S
    while run.poll() is None and time.monotonic() < end:
        if job.losses.exists() and job.losses.stat().st_size > before:
            return
        time.sleep(0.1)


def with_timeout(run: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return run.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def steps_of(file: Path) -> Iterator[tuple[int, float]]:
    """Steps and losses; not a line that was cut."""
    for line in file.read_text().splitlines():
        for part in re.findall(r"\{[^{}]*\}", line):
            row = json.loads(part)
            yield row["step"], row["loss"]


def judge(job: Job, expected: dict[int, float]) -> tuple[int, float]:
    """Steps that were taken in all, and the largest difference of a loss. Adds to the job's problems."""
    rows = list(steps_of(job.losses))
    worst = 0.0
    for step, loss in rows:
        apart = abs(loss - expected[step]) / abs(expected[step]) if math.isfinite(loss) else math.inf
        worst = max(worst, apart)
        if apart > TOLERANCE:
            job.problems.append(f"step {step}: loss {loss} for {expected[step]}")
    if {step for step, _ in rows} < set(range(job.total)):
        job.problems.append(f"steps missing: {sorted(set(range(job.total)) - {step for step, _ in rows})[:9]}")
    told: dict[int, Counter[str]] = {}
    for file in sorted((job.kept / "audit").glob("epoch-*.jsonl")):
        for line in map(json.loads, file.read_text().splitlines()):
            aside = [note["clip"] for note in line.get("set_aside", [])]
            if set(aside) - {MISSING} or (aside and not job.missing):
                job.problems.append(f"step {line['step']}: set aside {aside}")
            told.setdefault(line["step"], Counter()).update([*line["trained"], *aside])
    for step in range(job.total):
        if told.get(step) != Counter(f"clip-{n}" for n in BATCHES[step % len(BATCHES)]):
            job.problems.append(f"step {step}: the audit log has {told.get(step)}")
    drafts = [str(path) for path in job.folder.rglob("*draft*")]
    unfinished = [str(path) for path in job.kept.glob("step-*") if not (path / "commit.json").exists()]
    rest = [path.name for path in (job.folder / "tmp").iterdir() if not path.name.startswith(CACHES)]
    rest += [f"{SHARED}/{path.name}" for path in (job.folder / "shm").iterdir()]
    job.problems += [f"left: {names}" for names in (drafts, unfinished, rest) if names]
    return len(rows), worst


@contextmanager
def small_disk(place: Path) -> Iterator[None]:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", str(place)], capture_output=True, check=False
    )
    try:
        yield
    finally:
        if mounted.returncode == 0:
            subprocess.run(["umount", "-l", str(place)], check=False)


def undisturbed(folder: Path, missing: bool) -> dict[int, float]:
    job = Job(folder, missing)
    if missing:
        (folder / "clips" / f"{MISSING.split('-')[1]}.txt").unlink()
    run = start(job, STEPS, resume=False)
    if run.wait() != 0:
        raise SystemExit(job.log.read_text(errors="replace"))
    losses = dict(steps_of(job.losses))
    job.losses.unlink()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--logs", type=Path, help="where the folders of jobs that broke a rule are kept")
    options = parser.parse_args()
    rng = random.Random(options.seed)
    counts: Counter[str] = Counter()
    result: dict[str, Any] = {"seed": options.seed, "jobs": 0, "starts": 0, "faults": 0, "steps": 0, "again": 0,
                              "worst": 0.0, "broken": [], "isolated": False}  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="random-faults-") as place:
        pattern = {missing: Path(place) / f"pattern-{missing}" for missing in (False, True)}
        for folder in pattern.values():
            prepare(folder)
        isolated = may_isolate(pattern[False] / "shm")
        expected = {missing: undisturbed(folder, missing) for missing, folder in pattern.items()}
        began = time.monotonic()
        while time.monotonic() - began < options.seconds:
            number = result["jobs"]
            missing, torchrun = rng.random() < 0.25, rng.random() < 0.3
            folder = Path(place) / f"job-{number}"
            shutil.copytree(pattern[missing], folder)
            job = Job(folder, missing, rng.randrange(STEPS // 4, STEPS), torchrun, isolated)
            faults: list[str] = []
            with small_disk(folder / "disk"):
                wanted, ended = rng.randrange(3, 8), None
                while ended != 0 or newest_done(job) < job.total:
                    if job.starts > 30:
                        job.problems.append("it does not come to its end")
                        break
                    new, ended = one_start(job, rng, disturbed=len(faults) < wanted)
                    faults += new
                taken, worst = judge(job, expected[missing])
                if job.problems and options.logs:
                    shutil.copytree(folder, options.logs / f"seed-{options.seed}-job-{number}", dirs_exist_ok=True)
            counts.update(faults)
            result["isolated"] = isolated
            result["jobs"] += 1
            result["starts"] += job.starts
            result["faults"] += len(faults)
            result["steps"] += job.total
            result["again"] += taken - job.total
            result["worst"] = max(result["worst"], worst)
            if job.problems:
                told = {"job": number, "torchrun": torchrun, "faults": faults, "problems": job.problems[:5]}
                result["broken"].append(told)
                print(json.dumps(told, indent=1), flush=True)
            result["wall_s"] = round(time.monotonic() - began)
            result["kinds"] = dict(sorted(counts.items()))
            print(f"{result['wall_s']} s: {result['jobs']} jobs, {result['faults']} faults, "
                  f"{len(result['broken'])} broken", flush=True)  # fmt: skip
            if options.output:
                options.output.write_text(json.dumps(result, indent=1) + "\n")
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
