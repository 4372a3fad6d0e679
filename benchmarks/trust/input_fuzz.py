"""Damaged input to every command that reads some: only the product's own errors, few and short, soon, in little memory.

IR text, cluster files, manifests, tables, profiles, requests, schedules, training options, commits, tensors' files and
executables: bytes and lines damaged, tokens and values changed for others. Each input runs in a process of its own,
forked from one that has everything imported, with a limit on its memory. Wrong is: a traceback, an exit code other than
0 and 2, more than 20 errors or 10 kB of them, more than 10 s of processor time, more than 1 GiB.

    python -m benchmarks.trust.input_fuzz --inputs 2000 --executable build -o benchmarks/results/input_fuzz.json
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib
import io
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arachnec import cli
from arachnec.executable.folder import FINGERPRINTED, HEADER, digest_of
from benchmarks.trust.program_mutations import NAMED
from benchmarks.trust.text_mutations import MUTATIONS
from tests.commands import binary_inputs
from tests.commands.binary_inputs import BINARY
from tests.commands.test_hostile_input import GOLDEN, LONG, READERS, SEEDS, SHORT

MOST_ERRORS, MOST_BYTES, MOST_S, MOST_GIB = 20, 10_000, 10, 1
WALL_S = 60.0
WEIRD: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1e308,
    2**63,
    10**40,
    "",
    "\x1b[2J",
    "a" * 5000,
    [],
    {},
    [[]] * 50,
    "../../x",
)
COMMANDS: dict[str, tuple[tuple[str, ...], ...]] = {
    "module.cascade": (("check",), ("simulate",), ("show",), ("explain",), ("opt", "--passes", "check")),
    "table.json": (("plan", "--cluster", "2:cpu"),),
}


def damaged(text: str, rng: random.Random) -> bytes:
    """A file's text, wrong in one to four places."""
    for _ in range(rng.randint(1, 4)):
        at, piece = rng.randint(0, len(text)), rng.choice(SHORT + LONG)
        way = rng.randrange(4)
        if way == 0:
            text = text[:at] + piece + text[at + rng.randint(0, len(text) // 5) :]
        elif way == 1:
            text = text[:at] + text[at : at + 40] * rng.choice((2, 50, 3000)) + text[at + 40 :]
        else:
            text = text[:at] + (text[at + 1 :] if way == 2 else "")
    return text.encode("utf-8", "surrogatepass")


def other_values(text: str, rng: random.Random) -> bytes:
    """JSON of which a few values are something else."""
    lines = text.splitlines() if text.count("\n{") else [text]
    changed = []
    for line in lines:
        tree = json.loads(line)
        for _ in range(rng.randint(1, 3)):
            _change(tree, rng)
        changed.append(json.dumps(tree))
    return "\n".join(changed).encode()


def _change(tree: Any, rng: random.Random) -> None:
    keys = list(tree) if isinstance(tree, dict) else list(range(len(tree)))
    if not keys:
        return
    key = rng.choice(keys)
    if isinstance(tree[key], dict | list) and tree[key] and rng.random() < 0.7:
        _change(tree[key], rng)
    elif isinstance(tree, dict) and rng.random() < 0.2:
        del tree[key]
    elif isinstance(tree, dict) and rng.random() < 0.2:
        tree[rng.choice(("", "a" * 3000, "\x1b[2J", "[/bold]"))] = tree.pop(key)
    else:
        tree[key] = copy.deepcopy(rng.choice(WEIRD))


def other_tokens(text: str, rng: random.Random) -> bytes:
    rows = text.splitlines()
    with contextlib.suppress(IndexError, StopIteration, ValueError):
        for _ in range(rng.randint(1, 3)):
            rng.choice(MUTATIONS)(rows, rng)
    return ("\n".join(rows) + "\n").encode()


def one_input(name: str, folder: Path, executable: Path, rng: random.Random) -> Callable[[], int]:
    """Write a damaged input; what is to be run on it."""
    if name == "executable":
        return _damaged_executable(folder / "build", executable, rng)
    if name in BINARY:
        return _damaged_binary(name, folder / name, rng)
    seeds = [SEEDS[name]]
    if name == "module.cascade":
        seeds += [(GOLDEN / "check" / f"{golden}.cascade").read_text() for golden in NAMED]
    text = rng.choice(seeds)
    ways = [damaged]
    if name.endswith((".json", ".jsonl")):
        ways.append(other_values)
    if name.endswith(".cascade"):
        ways.append(other_tokens)
    path = folder / name
    path.write_bytes(rng.choice(ways)(text, rng))
    if name not in COMMANDS:
        return lambda: _read(READERS[name], path)
    words = rng.choice(COMMANDS[name])
    return lambda: cli.run((words[0], str(path), *words[1:]))


def _damaged_binary(name: str, path: Path, rng: random.Random) -> Callable[[], int]:
    write, read = BINARY[name]
    write(path)
    if rng.random() < 0.5:
        binary_inputs.other_values(name, path, rng)
    else:
        path.write_bytes(binary_inputs.damaged_bytes(name, path.read_bytes(), rng))
    return lambda: _read(read, path)


def _read(read: Callable[[Path], object], path: Path) -> int:
    """What a command prints and returns for a file that it reads first."""
    from arachnec.ir.diagnostic import UserError, render_all

    try:
        read(path)
    except UserError as error:
        print(render_all(error.diagnostics))
        return 2
    return 0


def _damaged_executable(folder: Path, whole: Path, rng: random.Random) -> Callable[[], int]:
    shutil.copytree(whole, folder)
    victim = rng.choice([HEADER, "program.cascade", "traced.cascade", "model.cascade", "clips.jsonl"])
    text = (folder / victim).read_text()
    ways = [damaged, *([other_values] if victim.endswith(("json", "jsonl")) else [other_tokens])]
    (folder / victim).write_bytes(rng.choice(ways)(text, rng))
    if victim != HEADER and rng.random() < 0.8:  # as somebody would who knows of fingerprints
        header = json.loads((folder / HEADER).read_text())
        known = {n: digest_of((folder / n).read_bytes()) for n in FINGERPRINTED}
        header["fingerprint"] = {**header["fingerprint"], **known}
        (folder / HEADER).write_text(json.dumps(header))
    word = rng.choice(("check", "show", "explain", "simulate"))
    return lambda: cli.run((word, str(folder)))


def judged(run: Callable[[], int]) -> str | None:
    """What is wrong with what a command did in a fork; None where nothing is."""
    with tempfile.TemporaryFile() as said:
        begun = time.monotonic()
        child = os.fork()
        if not child:
            _child(run, said.fileno())
        while time.monotonic() - begun < WALL_S:
            done, status, usage = os.wait4(child, os.WNOHANG)
            if done:
                break
            time.sleep(0.005)
        else:
            os.kill(child, signal.SIGKILL)
            os.wait4(child, 0)
            return f"it had not ended after {WALL_S:g} s"
        said.seek(0)
        text = said.read().decode(errors="replace")
    if "Traceback" in text:
        return "a traceback: " + text.strip().splitlines()[-1][:200]
    if not os.WIFEXITED(status) or os.WEXITSTATUS(status) not in (0, 2):
        return f"it ended with {status}: {text[-200:]}"
    errors = sum(line.startswith("error:") for line in text.splitlines())
    if errors > MOST_ERRORS or (errors and len(text) > MOST_BYTES):
        return f"{errors} errors in {len(text)} bytes"
    if usage.ru_utime + usage.ru_stime > MOST_S:
        return f"{usage.ru_utime + usage.ru_stime:.1f} s"
    return None


def _child(run: Callable[[], int], said: int) -> None:
    with contextlib.suppress(ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + MOST_GIB * 2**30
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (2 * MOST_S, 2 * MOST_S))
    os.dup2(said, 1)
    os.dup2(said, 2)
    try:
        code = run()
    except BaseException:
        with io.StringIO() as text:
            traceback.print_exc(file=text)
            os.write(2, text.getvalue().encode(errors="replace"))
        code = 1
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def judge_all(
    one: Callable[[int, Path, random.Random], tuple[str, dict[str, str], Callable[[], int]]],
    numbers: range,
    seed: int,
    output: Path | None,
    counts: Counter[str],
    wrong: list[dict[str, Any]],
) -> None:
    """Judge inputs, and write after each what is known so far. ``one`` makes an input below a folder: its kind, what
    tells it, and what is to be run on it."""
    for number in numbers:
        with tempfile.TemporaryDirectory(prefix="arachnec-fuzz-") as folder:
            kind, what, run = one(number, Path(folder), random.Random(f"{seed}/{number}"))
            counts[kind] += 1
            why = judged(run)
        if why is not None:
            wrong.append({"input": number, **what, "why": why})
            print(json.dumps(wrong[-1]), flush=True)
        result = {"inputs": number + 1, "seed": seed, "kinds": dict(counts), "wrong": wrong}
        if output:
            output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({"inputs": numbers.stop, "seed": seed, "kinds": dict(counts), "wrong": wrong}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--executable", type=Path, required=True, help="a folder that `arachnec compile` wrote")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    for command in ("check", "explain", "opt", "plan", "show", "simulate"):  # imported once for all forks
        importlib.import_module(f"arachnec.commands.{command}")
    kinds = [*READERS, *BINARY, "executable", "executable", "module.cascade"]
    counts: Counter[str] = Counter()
    wrong: list[dict[str, Any]] = []
    done = 0
    if options.output and options.output.exists():  # goes on where it was stopped
        earlier = json.loads(options.output.read_text())
        if earlier["seed"] == options.seed:
            done, wrong, counts = earlier["inputs"], earlier["wrong"], Counter(earlier["kinds"])

    def one(number: int, folder: Path, rng: random.Random) -> tuple[str, dict[str, str], Callable[[], int]]:
        name = kinds[number % len(kinds)]
        return name, {"kind": name}, one_input(name, folder, options.executable.absolute(), rng)

    judge_all(one, range(done, options.inputs), options.seed, options.output, counts, wrong)


if __name__ == "__main__":
    main()
