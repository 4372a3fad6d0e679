"""What half and twice of each number that the scheduler chose changes, on problems of ``portfolio_ablation.py``.

    python benchmarks/portfolio_constants.py [--only HOPE,HOT] [--json FILE]     # ten minutes of one core
    python benchmarks/portfolio_constants.py --json FILE --fill docs/planning.md # what FILE has into the page's table

Every arm is a process in which one number is another before anybody reads it. Effort is counted, 500 steps a plan, so
that the answer is the same on any machine. Numbers that say how fast a machine works are told apart only by a clock:
for them a plan has 300 ms of processor time (``processor_time.py``). A row says by how much plans are longer on average
than with the number as it is. Rows of other seeds say which changes are chance. What FILE has is not measured again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STEPS, BUDGET = 500, 300.0
SEEDS = (1, 2, 3)
EVERY = 3  # of the tables and mixes one of so many
HEADING = "### Numbers that were chosen"


@dataclass(frozen=True)
class Number:
    """A module's constant, the kinds of problems in which it is read, and whether a clock is needed to tell."""

    module: str
    name: str
    kinds: tuple[str, ...]
    speed: bool = False


ALL, PACKED, PLACED, TABLES = ("tables", "mixes", "placed"), ("mixes", "placed"), ("placed",), ("tables",)
SOLVER, PLANNING = "arachnec.solver", "arachnec.planning"
NUMBERS = (
    Number("__main__", "STEPS", ALL),  # stands for ``DEFAULT_BUDGET``
    Number(f"{SOLVER}.portfolio", "HOPE", ALL),
    Number(f"{SOLVER}.portfolio", "TRUST", ALL),
    Number(f"{SOLVER}.portfolio", "FLOOR", ALL),
    Number(f"{SOLVER}.budget", "OPERATIONS_PER_MS", ALL, speed=True),
    Number(f"{SOLVER}.budget", "LISTED", ALL, speed=True),
    Number(f"{SOLVER}.budget", "Z3_STEPS_PER_MS", TABLES, speed=True),
    Number(f"{SOLVER}.improvers", "PROVABLE", TABLES),
    Number(f"{SOLVER}.improvers", "CLAUSES_PER_MS", TABLES),
    Number(f"{SOLVER}.budget", "GRACE", ALL),
    Number(f"{SOLVER}.bound", "NEGLIGIBLE", ALL),
    Number(f"{SOLVER}.z3_proof", "BELOW", TABLES),
    Number(f"{SOLVER}.annealing", "TRIES", TABLES),
    Number(f"{SOLVER}.annealing", "HOT", TABLES),
    Number(f"{SOLVER}.annealing", "KINDS", TABLES),
    Number(f"{SOLVER}.annealing", "COOLER", TABLES),
    Number(f"{SOLVER}.large_neighbourhood", "TRY_MS", PACKED, speed=True),
    Number(f"{SOLVER}.large_neighbourhood", "STALL", PACKED),
    Number(f"{SOLVER}.large_neighbourhood", "PERTURBED", PACKED),
    Number(f"{SOLVER}.large_neighbourhood", "BLOCKS", PACKED),
    Number(f"{SOLVER}.large_neighbourhood", "WINDOW", PACKED),
    Number(f"{SOLVER}.widths", "FACTORS", PLACED),
    Number(f"{PLANNING}.placed_search", "JUDGING_MS", PLACED, speed=True),
    Number(f"{PLANNING}.family_placement", "PRICE", PLACED),
    Number(f"{PLANNING}.family_placement", "PLACED", PLACED),
    Number(f"{PLANNING}.family_placement", "LOOKS", PLACED),
)


@dataclass(frozen=True)
class Arm:
    """One number at another value, or none at another seed."""

    kinds: tuple[str, ...]
    number: Number | None = None
    factor: float = 1.0
    seed: int = 0
    clocked: bool = False

    @property
    def key(self) -> dict[str, object]:
        return {
            "constant": self.number.name if self.number else None,
            "factor": self.factor,
            "seed": self.seed,
            "effort": f"{BUDGET:g} ms" if self.clocked else f"{STEPS} steps",
        }

    def command(self) -> list[str]:
        script = [str(HERE / "processor_time.py"), Path(__file__).name] if self.clocked else [__file__]
        command = [sys.executable, *script, "--arm", ",".join(self.kinds), "--seed", str(self.seed)]
        command += ["--clocked"] if self.clocked else []
        if self.number is None:
            return command
        return [*command, "--set", f"{self.number.module}:{self.number.name}", "--factor", str(self.factor)]


def arms(numbers: tuple[Number, ...]) -> Iterator[Arm]:
    """First what they are compared with."""
    for clocked in sorted({number.speed for number in numbers}):
        for seed in (0, *SEEDS):
            yield Arm(ALL, seed=seed, clocked=clocked)
    for number in numbers:
        for factor in (0.5, 2.0):
            yield Arm(number.kinds, number, factor, clocked=number.speed)


def change(module: str, name: str, factor: float) -> None:
    """The constant times so much, whole where it is whole; of factors so many times as many primes."""
    place = importlib.import_module(module)
    value = getattr(place, name)
    if isinstance(value, tuple):
        value = (2, 3, 5, 7, 11, 13, 17, 19)[: round(factor * len(value))]
    else:
        value = type(value)(value * factor)
    setattr(place, name, value)


def gaps(kinds: list[str], seed: int, *, clocked: bool) -> dict[str, list[tuple[float, bool]]]:
    """Of every plan the gap, and whether it was proved."""
    from portfolio_ablation import clock_of, mixes, modules, tables

    ways = {"tables": lambda: tables(40)[::EVERY], "mixes": lambda: mixes()[::EVERY], "placed": lambda: modules()[::2]}
    begin = clock_of(None, BUDGET) if clocked else clock_of(STEPS, 0.0)
    return {kind: [plan(begin, seed, ()) for plan in ways[kind]()] for kind in kinds}


def row(arm: Arm, answers: dict[str, Any], base: dict[str, Any]) -> dict[str, Any]:
    """Changes of length, relative to those of ``base``, by kind of problem."""
    by_kind: dict[str, Any] = {}
    for kind, plans in answers.items():
        own = [round(gap, 6) for gap, _ in plans]
        than = base[kind]["gaps"] if base else own
        changes = [(1 + gap) / (1 + other) - 1 for gap, other in zip(own, than, strict=True)]
        by_kind[kind] = {
            "change": round(statistics.mean(changes), 6),
            "longer": sum(change > 0 for change in changes),
            "shorter": sum(change < 0 for change in changes),
            "proofs": sum(proved for _, proved in plans),
            "gaps": own,
        }
    return arm.key | by_kind


def measure(numbers: tuple[Number, ...], file: Path | None) -> None:
    rows: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8")) if file and file.exists() else []
    for arm in arms(numbers):
        if any(arm.key.items() <= known.items() for known in rows):
            continue
        lines = subprocess.run(arm.command(), check=True, capture_output=True, text=True).stdout.splitlines()
        first = Arm(ALL, clocked=arm.clocked).key.items()
        base = next((known for known in rows if first <= known.items()), {})
        rows.append(row(arm, json.loads(lines[-1]), base))
        changes = [f"{kind} {rows[-1][kind]['change']:+.3%}" for kind in arm.kinds]
        print(arm.key["constant"], arm.factor, arm.seed, *changes, flush=True)
        if file:
            file.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def cell(rows: list[dict[str, Any]], name: str, factor: float) -> str:
    """Changes in percent, by the first letter of the kind of problem."""
    asked = {"constant": "STEPS" if name == "DEFAULT_BUDGET" else name, "factor": factor}
    measured = next((known for known in rows if asked.items() <= known.items()), None)
    if measured is None:
        return "not measured"
    return ", ".join(f"{kind[0]} {100 * measured[kind]['change']:+.2f}" for kind in ALL if kind in measured)


def filled(page: str, rows: list[dict[str, Any]]) -> str:
    """The page with the last two cells of every constant's row as measured."""
    before, table = page.split(HEADING)
    table, *rest = table.split("\n### ")
    lines = table.split("\n")
    for at, line in enumerate(lines):
        if line.startswith("| `"):
            *cells, _, _ = line.strip("|").split("|")
            ends = [f" {cell(rows, cells[0].strip(' `'), factor)} " for factor in (0.5, 2.0)]
            lines[at] = "|" + "|".join([*cells, *ends]) + "|"
    return before + HEADING + "\n### ".join(["\n".join(lines), *rest])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names, such as HOPE,HOT")
    parser.add_argument("--json", type=Path, help="write every gap there")
    parser.add_argument("--fill", type=Path, help="a page, whose table is to say what is measured")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--set", help=argparse.SUPPRESS)
    parser.add_argument("--factor", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--clocked", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fill:
        rows = json.loads(options.json.read_text(encoding="utf-8"))
        options.fill.write_text(filled(options.fill.read_text(encoding="utf-8"), rows), encoding="utf-8")
        return
    if options.arm is None:
        names = options.only.split(",") if options.only else [number.name for number in NUMBERS]
        measure(tuple(number for number in NUMBERS if number.name in names), options.json)
        return
    if options.set:
        module, name = options.set.split(":")
        change(module, name, options.factor)
    print(json.dumps(gaps(options.arm.split(","), options.seed, clocked=options.clocked)))


if __name__ == "__main__":
    main()
