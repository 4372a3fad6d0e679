"""The scheduler's numbers are few, and each has a name, and a row of docs/planning.md with what it changes."""

from __future__ import annotations

import ast
import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLANNING = (
    "candidates exposed_sync family_degrees family_placement following handoff_memory placed_cascade placed_search "
    "placement rank_choice rank_trades simulated_objective"
)
OTHERS = {
    "malleable",
    "pools",
    "insertion",
    "insertion_search",
    "latency_bound",
    "group_rounds",
}  # of sampling and of the baselines
FILES = [
    *(path for path in sorted((ROOT / "arachnec/solver").glob("*.py")) if path.stem not in OTHERS),
    *(ROOT / "arachnec/planning" / f"{name}.py" for name in PLANNING.split()),
    ROOT / "arachnec/passes/schedule_z3.py",
]
# A unit, limits and names of Z3's, where arrays become faster than loops, and rounding.
NO_CHOICE = {"TICKS", "LARGEST_NUMBER", "DIFFERENCES", "SMALL", "TOLERANCE"}
# Once and twice, halves, units of time and tolerances of floats; bits of integers, digits of a text, entries of a memo.
PLAIN = {0, 1, 2, 0.5, 1e3, 1e-3, 1e-6, 31, 61, 62, 6, 256}


def numbers(node: ast.AST) -> list[float]:
    constants = (at.value for at in ast.walk(node) if isinstance(at, ast.Constant))
    return [value for value in constants if isinstance(value, int | float) and not isinstance(value, bool)]


def named(path: Path) -> dict[str, list[float]]:
    """The numbers of a file's constants, by their names."""
    chosen: dict[str, list[float]] = {}
    for statement in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and numbers(statement.value):
            names = [at.id for at in ast.walk(statement.targets[0]) if isinstance(at, ast.Name)]
            several = isinstance(statement.targets[0], ast.Tuple)
            for name, value in zip(names, numbers(statement.value), strict=False):
                chosen[name] = [value] if several else numbers(statement.value)
    return {name: values for name, values in chosen.items() if name.isupper() and name not in NO_CHOICE}


CONSTANTS = {name: values for path in FILES for name, values in named(path).items()}


def rows() -> dict[str, list[str]]:
    """The table of docs/planning.md: cells by the constant's name."""
    text = (ROOT / "docs/planning.md").read_text(encoding="utf-8").split("### Numbers that were chosen")[1]
    lines = [line for line in text.split("\n### ")[0].splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len({row[0] for row in cells}) == len(cells)
    return {row[0].strip("`"): row[1:] for row in cells}


def test_the_scheduler_has_at_most_25_numbers_and_each_its_row() -> None:
    assert len(CONSTANTS) <= 25
    assert rows().keys() == CONSTANTS.keys()
    for name, (value, *_) in rows().items():
        shown = [float(part.replace(",", "").split()[0]) for part in value.split(";")]
        assert shown == CONSTANTS[name], name


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_other_number_stands_in_the_scheduler(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    inside = [at for at in tree.body if not (isinstance(at, ast.Assign) and ast.unparse(at.targets[0]).isupper())]
    literals = {value for statement in inside for value in numbers(statement)}
    assert literals <= PLAIN, f"{path.stem} has {literals - PLAIN}"


def test_the_table_says_what_half_and_twice_changed() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks/portfolio_constants.py"))
    results = ROOT / "benchmarks/results/portfolio_constants.json"
    measured = json.loads(results.read_text(encoding="utf-8")) if results.exists() else []
    varied = {number.name if number.name != "STEPS" else "DEFAULT_BUDGET" for number in script["NUMBERS"]}
    assert varied == CONSTANTS.keys()
    page = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
    assert script["filled"](page, measured) == page
