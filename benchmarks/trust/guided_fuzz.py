"""Coverage-guided fuzzing with atheris of every reader that `input_fuzz.py` damages at random, and of the proof.

The readers and their inputs are those of the suite. libFuzzer keeps what reaches new branches of arachnec, the only
package that is instrumented, and goes on from there: half of its steps are its own, the others damage text, values and
tokens as `input_fuzz.py` does. Everything is imported once; each reader is a fork. Wrong is: a traceback, more than 20
errors or 10 kB of them, more than 10 s of processor time or 1 GiB for one input, a crash. What is wrong is told once
for each place, and the fuzzing goes on.

    python -m benchmarks.trust.guided_fuzz --seconds 180 -o benchmarks/results/guided_fuzz.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import resource
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import atheris

LARGEST = 65536  # bytes of an input; larger ones are in the suite
KEPT = 4000  # bytes of a wrong input that the result shows
WALL_S = 60  # in one input, then libFuzzer ends the process
Targets = dict[str, tuple[list[bytes], Callable[[Path], object]]]


def targets() -> Targets:
    """Name: inputs to begin with, and what reads a file. Whoever calls this imports arachnec."""
    from arachnec.backends.simulator import simulate
    from arachnec.ir.parser import parse_module
    from arachnec.ir.verify import check_module
    from arachnec.passes.check import checked
    from arachnec.views.explain import explain
    from benchmarks.trust.program_mutations import NAMED
    from tests.commands.binary_inputs import BINARY
    from tests.commands.test_hostile_input import GOLDEN, PROGRAMS, READERS, SEEDS

    def proved(path: Path) -> object:
        """As the commands that look at a program."""
        module = parse_module(path.read_text(encoding="utf-8", errors="replace"), str(path))
        check_module(module)
        checked(module)
        return simulate(module), explain(module)

    programs = [(GOLDEN / name).read_bytes() for name in PROGRAMS]
    named = [(GOLDEN / "check" / f"{name}.cascade").read_bytes() for name in NAMED]
    known: Targets = {name: ([SEEDS[name].encode()], read) for name, read in READERS.items()}
    known["module.cascade"][0].extend(programs + named)
    known["program.cascade"] = programs + named, proved
    with tempfile.TemporaryDirectory(prefix="arachnec-seeds-") as folder:
        for name, (write, read) in BINARY.items():
            write(Path(folder) / name)
            known[name] = [(Path(folder) / name).read_bytes()], read
    return known


def mutator(name: str) -> Callable[[bytes, int, int], bytes]:
    """One step of libFuzzer's, or one of `input_fuzz.py`."""
    from benchmarks.trust.input_fuzz import damaged, other_tokens, other_values
    from tests.commands import binary_inputs

    def mutated(data: bytes, most: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < 0.5 or not data:
            return atheris.Mutate(data, most)
        text = data.decode(errors="replace")
        with contextlib.suppress(ValueError, LookupError, TypeError, RecursionError):  # what is no JSON any more
            if name.endswith((".safetensors", ".parquet")):
                return binary_inputs.damaged_bytes(name, data, rng)[:most]
            if name.endswith((".json", ".jsonl")) and rng.random() < 0.6:
                return other_values(text, rng)[:most]
            if name.endswith(".cascade") and rng.random() < 0.6:
                return other_tokens(text, rng)[:most]
        return damaged(text, rng)[:most]

    return mutated


def reader(read: Callable[[Path], object], path: Path, tell: Callable[[str, bytes], None]) -> Callable[[bytes], None]:
    """What libFuzzer calls with an input."""
    from arachnec.ir.diagnostic import UserError, render_all
    from benchmarks.trust.input_fuzz import MOST_BYTES, MOST_ERRORS, MOST_GIB, MOST_S

    def one(data: bytes) -> None:
        path.write_bytes(data)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + MOST_GIB * 2**30
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        begun = time.process_time()
        said = ""
        try:
            read(path)
        except UserError as error:
            said = render_all(error.diagnostics)
        except Exception:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
            tell(traceback.format_exc(), data)
        if (seconds := time.process_time() - begun) > MOST_S:
            tell(f"{seconds:.0f} s", data)
        if sum(line.startswith("error:") for line in said.splitlines()) > MOST_ERRORS or len(said) > MOST_BYTES * 1.1:
            tell(f"{len(said)} bytes of errors", data)

    return one


def place_of(why: str) -> str:
    """Where it went wrong: two inputs that break one line are one finding."""
    lines = re.findall(r'File ".*?(arachnec/\S+)", line (\d+)', why)
    return ":".join(lines[-1]) if lines else re.sub(r"\d+", "N", why)[:80]


def fuzz(name: str, known: Targets, folder: Path, bounds: list[str]) -> NoReturn:
    """In a fork: libFuzzer ends it."""
    seeds, read = known[name]
    corpus, work = folder / "corpus", folder / "work"
    for place in (corpus, work):
        place.mkdir()
    for number, seed in enumerate(seeds):
        (corpus / str(number)).write_bytes(seed)
    places: set[str] = set()

    def tell(why: str, data: bytes) -> None:
        if (place := place_of(why)) not in places:
            places.add(place)
            told = {"place": place, "why": why.strip().splitlines()[-1][:300], "trace": why[-2000:]}
            (folder / f"wrong-{len(places)}").write_bytes(data)
            with (folder / "wrong.jsonl").open("a") as file:
                file.write(json.dumps(told | {"input": ascii(data[:KEPT]), "bytes": len(data)}) + "\n")

    log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    options = ["-rss_limit_mb=0", f"-timeout={WALL_S}", f"-max_len={LARGEST}", "-print_final_stats=1", *bounds]
    atheris.Setup(
        [name, f"-artifact_prefix={folder}/crash-", *options, str(corpus)],
        reader(read, work / name, tell),
        custom_mutator=mutator(name),
    )
    atheris.Fuzz()
    os._exit(0)


def fuzzed(name: str, known: Targets, bounds: list[str], keep: Path | None) -> dict[str, Any]:
    """What became of one reader: how many inputs, which were wrong."""
    with tempfile.TemporaryDirectory(prefix="arachnec-guided-") as place:
        folder = Path(place)
        begun = time.monotonic()
        child = os.fork()
        if not child:
            try:
                fuzz(name, known, folder, bounds)
            except BaseException:
                (folder / "log").write_text(traceback.format_exc())
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        log = (folder / "log").read_text(errors="replace")
        runs = re.search(r"number_of_executed_units: (\d+)", log)
        branches = re.findall(r"cov: (\d+)", log)
        wrong = [json.loads(row) for row in (folder / "wrong.jsonl").read_text().splitlines()] if (
            folder / "wrong.jsonl"
        ).exists() else []  # fmt: skip
        if status:
            crashes = [file.read_bytes() for file in folder.glob("crash-*")]
            inputs = [ascii(data[:KEPT]) for data in crashes]
            wrong.append({"place": "the process", "why": f"ended with {status}", "trace": log[-2000:], "input": inputs})
        if keep and wrong:
            for file in (*folder.glob("wrong-*"), *folder.glob("crash-*")):
                (keep / f"{name}.{file.name}").write_bytes(file.read_bytes())
        return {
            "inputs": int(runs[1]) if runs else 0,
            "branches": int(branches[-1]) if branches else 0,
            "wall_s": round(time.monotonic() - begun),
            "wrong": wrong,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--readers", help="by commas; all where it is left out")
    parser.add_argument("--seconds", type=int, help="for each reader")
    parser.add_argument("--runs", type=int, help="inputs for each reader")
    parser.add_argument("--seed", type=int, default=1, help="not 0, which is libFuzzer's for any")
    parser.add_argument("--keep", type=Path, help="a folder for the inputs that are wrong")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    bounds = [f"-seed={options.seed}"]
    bounds += [f"-max_total_time={options.seconds}"] if options.seconds else []
    bounds += [f"-runs={options.runs}"] if options.runs else []
    if len(bounds) == 1:
        parser.error("say --seconds or --runs")
    results: dict[str, dict[str, Any]] = {}
    with atheris.instrument_imports(include=["arachnec"]):  # what readers import later, too
        known = targets()
        for name in options.readers.split(",") if options.readers else known:
            results[name] = fuzzed(name, known, bounds, options.keep)
            short = {key: value for key, value in results[name].items() if key != "wrong"}
            print(
                json.dumps({"reader": name, **short, "wrong": [w["why"] for w in results[name]["wrong"]]}), flush=True
            )
            if options.output:
                result = {"seed": options.seed, "seconds": options.seconds, "runs": options.runs, "readers": results}
                options.output.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(any(result["wrong"] for result in results.values()))


if __name__ == "__main__":
    main()
