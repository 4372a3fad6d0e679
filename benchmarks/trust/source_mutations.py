"""One-token changes of proofs, lowering, placement, cost, pipelines and cells: do the tests of that part notice?

Operators, comparisons, numbers, booleans, ``min`` for ``max``, ``and`` for ``or``: all of them, or a sample drawn by
seed. What stands in a function is judged by ``mutated_functions``: by the tests that enter the function, in seconds.
The rest, and what only ranks that are processes of their own run, is made in a copy of the repository, and the tests of
its part run there until the first that fails, those that name the changed file first; they run in a fork of this
process, which has imported the libraries and nothing of ours. A survivor is shown with its line. What is in the output
file already is not judged again.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest

from benchmarks.trust.mutated_functions import DIES, OUTSIDE, SURVIVES, MutationServer
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
RANKS = ("model_state/cells",)  # run by processes that import it
OTHER = {
    "+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=",
    "!=": "==", "and": "or", "or": "and", "min": "max", "max": "min", "True": "False", "False": "True",
    "any": "all", "all": "any", "0": "1", "1": "2", "2": "3", "1.0": "2.0", "0.0": "1.0",
}  # fmt: skip
IMPORTED = "ignore::pytest.PytestAssertRewriteWarning"  # of hypothesis, before this run of pytest
LEFT = (".git", ".venv", "__pycache__", ".*_cache", ".hypothesis")  # not copied
SLOW = "not judged: its tests did not end in time"


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


def changed_text(change: Change, text: str) -> str:
    rows = text.splitlines(keepends=True)
    row = rows[change.line - 1]
    rows[change.line - 1] = row[: change.column] + change.after + row[change.column + len(change.before) :]
    return "".join(rows)


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
    (root / change.file).write_text(changed_text(change, whole))
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


def row_of(change: Change, fate: str, by: str) -> dict[str, Any]:
    return {"file": change.file, "line": change.line, "column": change.column, "text": change.text.strip(),
            "change": f"{change.before} -> {change.after}", "fate": fate, "by": by}  # fmt: skip


def key_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["file"], row["line"], row["column"], row["change"]


def judged_in_place(parts: Sequence[str], todo: Sequence[Change], folder: Path) -> list[dict[str, Any]]:
    """Those inside of functions, by a server on every processor; see ``mutated_functions``."""
    tests = list(dict.fromkeys(place for part in parts for place in PARTS[part]))

    def judge(server: MutationServer, number: int, of: int) -> None:
        with (folder / str(number)).open("w") as output:
            for change in todo[number::of]:
                text = (ROOT / change.file).read_text()
                row = row_of(change, *server.fate(ROOT / change.file, text, changed_text(change, text)))
                print(json.dumps(row), file=output, flush=True)

    child = os.fork()
    if not child:
        code = 1
        try:
            os.environ.update(CI="1", OMP_NUM_THREADS="1")  # the same examples for every change
            packages = [ROOT / "arachnec" / part for part in parts]
            options = ["-q", "-n", "0", "-p", "no:cacheprovider", "-W", IMPORTED, *tests]
            code = int(pytest.main(options, plugins=[MutationServer(packages, judge)]))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if status:
        raise SystemExit("the tests could not be run in place")
    return [json.loads(row) for file in sorted(folder.iterdir()) for row in file.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, help="changes, drawn by --seed; all of them without it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parts", default=",".join(PARTS), help="of which the sample is drawn, by commas")
    parser.add_argument("--seconds", type=float, default=600.0, help="until the tests of a part count as endless")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    parts = options.parts.split(",")
    every = [change for part in parts for file in files(part) for change in changes(file)]
    sample = random.Random(options.seed).sample(every, options.sample or len(every))
    told: list[dict[str, Any]] = []
    if options.output and options.output.exists():  # goes on where it was stopped
        earlier = json.loads(options.output.read_text())
        told = earlier["changes"] if earlier["seed"] == options.seed and earlier["parts"] == parts else []

    def tell(rows: Sequence[dict[str, Any]]) -> None:
        told.extend(rows)
        for row in rows:
            print(f"{row['fate']}: {row['file']}:{row['line']} {row['change']}: {row['text'][:90]}", flush=True)
        counts = Counter(row["fate"] for row in told)
        result = {"seed": options.seed, "parts": parts, "of": len(every), "made": len(told), **counts, "changes": told}
        if options.output:
            options.output.write_text(json.dumps(result, indent=1) + "\n")

    for library in LIBRARIES:
        importlib.import_module(library)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the copy goes with it
    with tempfile.TemporaryDirectory(prefix="arachnec-mutations-") as folder:
        root, rows = Path(folder) / "repository", Path(folder) / "rows"
        shutil.copytree(ROOT, root, ignore=shutil.ignore_patterns(*LEFT), symlinks=True)
        rows.mkdir()
        left = [change for change in sample if key_of(row_of(change, "", "")) not in set(map(key_of, told))]
        here = [change for change in left if not change.file.startswith(tuple(f"arachnec/{part}/" for part in RANKS))]
        if here:
            tell([row for row in judged_in_place([part for part in parts if part not in RANKS], here, rows)
                  if row["fate"] != OUTSIDE])  # fmt: skip
        done = set(map(key_of, told))
        for change in left:
            if key_of(row_of(change, "", "")) not in done:
                tell([row_of(change, *judged(change, root, options.seconds))])


if __name__ == "__main__":
    main()
