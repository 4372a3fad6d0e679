"""One-token changes of proofs, lowering, placement, cost, pipelines and cells: do the tests of that part notice?

Drawn by seed: operators, comparisons, numbers, booleans, ``min`` for ``max``, ``and`` for ``or``. Each is made in a
copy of the repository, and the tests of its part run there until the first that fails: those that name the changed
file first. They run in a fork of this process, which has imported the libraries and nothing of ours. A survivor is
shown with its line. What is in the output file already is not judged again.

    python -m benchmarks.trust.source_mutations --sample 60 --seed 1 -o benchmarks/results/source_mutations.json
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import importlib
import io
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import tokenize
import traceback
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.warm_python import END_WITH_PARENT, LIBRARIES

ROOT = Path(__file__).parents[2]
HOUSE = ("tests/house/test_dataclasses.py", "tests/house/test_zips.py")
PARTS: dict[str, tuple[str, ...]] = {
    "verification": (*HOUSE, "tests/verification", "tests/golden/test_golden.py"),
    "lowering": (*HOUSE, "tests/lowering", "tests/verification", "tests/golden/test_golden.py"),
    "planning": (*HOUSE, "tests/planning", "tests/golden/test_golden.py"),
    "cost": (*HOUSE, "tests/cost", "tests/golden/test_golden.py", "tests/planning"),
    "pipelining": (*HOUSE, "tests/pipelining", "tests/golden/test_golden.py", "tests/planning"),
    "model_state/cells": (
        *HOUSE, "tests/equivalence", "tests/distributed/executor/cells", "tests/distributed/executor/stages",
    ),
}  # fmt: skip
OTHER = {
    "+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=",
    "!=": "==", "and": "or", "or": "and", "min": "max", "max": "min", "True": "False", "False": "True",
    "any": "all", "all": "any", "0": "1", "1": "2", "2": "3", "1.0": "2.0", "0.0": "1.0",
}  # fmt: skip
IMPORTED = "ignore::pytest.PytestAssertRewriteWarning"  # of hypothesis, before this run of pytest
LEFT = (".git", ".venv", "__pycache__", ".*_cache", ".hypothesis")  # not copied
SURVIVES, DIES, SLOW = "survives", "dies", "not judged: its tests did not end in time"


@dataclass(frozen=True)
class Change:
    file: str
    line: int
    column: int
    before: str
    after: str
    text: str  # the line as it was


def files(part: str) -> list[Path]:
    """Of planning those that place."""
    return sorted((ROOT / "arachnec" / part).glob("*placement*.py" if part == "planning" else "*.py"))


def changes(file: Path) -> list[Change]:
    """Every change of one token of code; none in imports, annotations of types, messages and docstrings."""
    source = file.read_text()
    tree = ast.parse(source)
    kept_out: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) or (isinstance(node, ast.AnnAssign) and node.value is None):
            kept_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        if isinstance(node, ast.FunctionDef):
            kept_out.update(range(node.lineno, node.body[0].lineno))
    lines = source.splitlines()
    return [
        Change(str(file.relative_to(ROOT)), row, column, token.string, OTHER[token.string], lines[row - 1])
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        for row, column in (token.start,)
        if token.type in (tokenize.OP, tokenize.NAME, tokenize.NUMBER) and token.string in OTHER and row not in kept_out
    ]


def applied(change: Change, root: Path) -> None:
    path = root / change.file
    rows = path.read_text().splitlines(keepends=True)
    row = rows[change.line - 1]
    rows[change.line - 1] = row[: change.column] + change.after + row[change.column + len(change.before) :]
    path.write_text("".join(rows))


def nearest_first(change: Change, root: Path) -> list[str]:
    """The test files of the change's part: rules of the house, which take a second, then those that name its file or
    import from it most often, then the shortest, then the golden tests, which start with what all import."""
    part, stem = Path(change.file).parent.relative_to("arachnec").as_posix(), Path(change.file).stem
    files = [
        file
        for place in PARTS[part]
        for file in (sorted((root / place).glob("test_*.py")) if (root / place).is_dir() else [root / place])
    ]
    texts = {file: file.read_text() for file in files}
    house = {root / rule for rule in HOUSE}
    files.sort(key=lambda file: (file not in house, -texts[file].count(stem), "golden" in file.parts, len(texts[file])))
    return [str(file.relative_to(root)) for file in files]


def judged(change: Change, root: Path, seconds: float) -> tuple[str, str]:
    """What becomes of it, and the test that failed."""
    said = root / "tests.log"
    whole = (root / change.file).read_text()
    applied(change, root)
    begun = time.monotonic()
    try:
        child = os.fork()
        if not child:
            _tested(nearest_first(change, root), root, said)
        while time.monotonic() - begun < seconds:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                failed = [
                    row.split(" - ")[0] for row in said.read_text().splitlines() if row.startswith(("FAILED", "ERROR"))
                ]
                if os.WIFSIGNALED(status):  # a deadlock that gloo aborts, a crash
                    return DIES, f"the process of the tests, by signal {os.WTERMSIG(status)}"
                if status and not failed:  # no test has noticed anything
                    raise SystemExit(said.read_text()[-3000:])
                return (DIES, failed[0]) if failed else (SURVIVES, "")
            time.sleep(0.05)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return SLOW, ""
    finally:
        (root / change.file).write_text(whole)


def _tested(tests: list[str], root: Path, said: Path) -> NoReturn:
    """Run them in this fork, on the copy, and end."""
    code = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(END_WITH_PARENT, signal.SIGKILL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        output = os.open(said, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        for number in (1, 2):
            os.dup2(output, number)
        os.chdir(root)
        os.environ.update(PYTHONPATH=str(root), PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
        os.environ["CI"] = "1"  # the same examples for every change: one that is found for one of them kills no other
        sys.dont_write_bytecode = True
        sys.path[:] = [str(root), *(place for place in sys.path if Path(place or ".").resolve() != ROOT)]
        for name in [name for name in sys.modules if name.split(".")[0] in ("arachnec", "benchmarks", "tests")]:
            del sys.modules[name]
        code = int(pytest.main(["-q", "-x", "-p", "no:cacheprovider", "-W", IMPORTED, *tests]))
        sys.stdout.flush()
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", default=",".join(PARTS), help="of which the sample is drawn, by commas")
    parser.add_argument("--seconds", type=float, default=600.0, help="until the tests of a part count as endless")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    parts = options.parts.split(",")
    every = [change for part in parts for file in files(part) for change in changes(file)]
    sample = random.Random(options.seed).sample(every, options.sample)
    told: list[dict[str, Any]] = []
    if options.output and options.output.exists():  # goes on where it was stopped
        earlier = json.loads(options.output.read_text())
        told = earlier["changes"] if earlier["seed"] == options.seed and earlier["parts"] == parts else []
    for library in LIBRARIES:
        importlib.import_module(library)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the copy goes with it
    with tempfile.TemporaryDirectory(prefix="arachnec-mutations-") as folder:
        root = Path(folder) / "repository"
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(*LEFT), symlinks=True)
        for number, change in enumerate(sample, 1):
            key = (change.file, change.line, f"{change.before} -> {change.after}", change.column)
            if key in {(one["file"], one["line"], one["change"], one["column"]) for one in told}:
                continue
            fate, by = judged(change, root, options.seconds)
            told.append({"file": change.file, "line": change.line, "column": change.column, "text": change.text.strip(),
                         "change": f"{change.before} -> {change.after}", "fate": fate, "by": by})  # fmt: skip
            print(f"{number}/{len(sample)} {fate}: {change.file}:{change.line} {change.before} -> {change.after}: "
                  f"{change.text.strip()[:90]}", flush=True)  # fmt: skip
            if options.output:
                counts = Counter(one["fate"] for one in told)
                result = {
                    "seed": options.seed,
                    "parts": parts,
                    "of": len(every),
                    "made": len(told),
                    **counts,
                    "changes": told,
                }
                options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
