"""Lowered programs broken in one place: each is refused by ``check``, or shown to change nothing by executing it.

Instructions dropped, doubled, swapped, moved, or put on another rank; single tokens of the text changed: numbers,
lists, names, operations, peers, attributes left out or added; the same on all ranks alike. A program that is accepted
is executed on small tensors, and must compute what the reference does. Execution says nothing of memory: of a drawn
program, which claims exactly what it needs, one that claims less and is accepted counts as a survivor.

    python -m benchmarks.trust.program_mutations --mutations 300 -o benchmarks/results/program_mutations.json
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

from arachnec.equivalence.compare import demand_equivalent
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Module
from arachnec.ir.parser import parse_module
from benchmarks.trust.random_layouts import random_layout
from benchmarks.trust.random_programs import random_program
from benchmarks.trust.text_mutations import MUTATIONS, Rows, accepted, rows_of

GOLDEN = Path(__file__).parents[2] / "tests" / "golden"
NAMED = (
    "valid", "buckets_valid", "cells_valid", "heads_valid", "host_valid", "tied_stages_valid", "updates_gathered_valid",
)  # fmt: skip
LOWERED = (
    "lower/cells", "lower/host_memory", "lower/sparse_heads",
    "schedule_pipeline/a_degree_for_each_stage", "schedule_pipeline/stages_in_cells",
    "shard_optimizer/over_the_ranks_of_a_stage",
)  # fmt: skip
SECONDS = 25.0  # until a program that stands still is given up
HELD = re.compile(r"\b(memory|workspace|state|host|host_state|from_host|to_host) = ([\d.e+-]+)")


def judged(before: Module, text: str, *, execute: bool = True) -> tuple[str, str]:
    """What became of a mutation: refused, unchanged, harmless or SURVIVES; and by what. ``accepted`` if not to be
    executed."""
    module = accepted(before, text)
    if isinstance(module, tuple):
        return module
    if before.name == "step" and "saved" in before.stages[-1].attrs and less_claimed(rows_of(before), rows_of(module)):
        return "SURVIVES", "a claim of less memory"
    if not execute:
        return "accepted", ""
    try:
        demand_equivalent(module, SECONDS)
    except UserError as error:
        return "SURVIVES", str(error).splitlines()[0][:200]
    return "harmless", ""


def less_claimed(before: Rows, after: Rows) -> bool:
    """Whether one line claims less than before; lines that are not in both do not count. Of a cascade that claims
    nothing reports show what its stage's formulas say."""
    pairs = [(a, b) for a, b in zip(before, after, strict=False) if a != b]
    if len(pairs) != 1 or len(before) != len(after):
        return False
    held = [dict(HELD.findall(row)) for row in pairs[0]]
    if pairs[0][0].startswith("  %") and "memory" not in held[1]:
        return False
    return any(float(held[1].get(name, 0.0)) < float(value) for name, value in held[0].items())


def sources(seed: int, count: int) -> dict[str, Module]:
    """Golden programs, and ``count`` drawn ones of whole models and of layouts each."""
    golden = {name: parse_module((GOLDEN / "check" / f"{name}.cascade").read_text(), name) for name in NAMED}
    golden |= {name: parse_module((GOLDEN / f"{name}.expect").read_text(), name) for name in LOWERED}
    drawn = {f"random_{n}": random_program(random.Random(f"{seed}/{n}"), ranks=4) for n in range(count)}
    layouts = {f"layout_{n}": random_layout(random.Random(f"{seed}/{n}"), ranks=4)[1] for n in range(count)}
    return golden | {name: module for name, module in (drawn | layouts).items() if len(module.programs) > 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutations", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    known = sources(options.seed, 6)
    result: dict[str, Any] = {
        "drawn": 0,
        "seed": options.seed,
        "kinds": {},
        "rules": {},
        "programs": {},
        "survivors": [],
    }
    if options.output and options.output.exists():  # goes on where it was stopped
        earlier = json.loads(options.output.read_text())
        result = earlier if earlier["seed"] == options.seed else result
    kinds, rules, programs = (Counter(result[name]) for name in ("kinds", "rules", "programs"))
    survivors = result["survivors"]
    while sum(kinds.values()) < options.mutations:
        rng = random.Random(f"{options.seed}/{result['drawn']}")
        result["drawn"] += 1
        name, mutate = rng.choice(sorted(known)), rng.choice(MUTATIONS)
        before = known[name]
        rows = rows_of(before)
        mutate(rows, rng)
        text = "\n".join(rows) + "\n"
        kind, why = judged(before, text)
        if kind == "unchanged":
            continue
        kinds[kind] += 1
        programs[name] += 1
        if kind == "refused":
            rules[why] += 1
        if kind == "SURVIVES":
            old = rows_of(before)
            changed = [row for row in rows if row not in old] + [f"- {row}" for row in old if row not in rows]
            survivors.append({"program": name, "mutation": mutate.__name__, "lines": changed[:4], "why": why})
            print(json.dumps(survivors[-1]), flush=True)
        result |= {"kinds": dict(kinds), "rules": dict(rules.most_common()), "programs": dict(sorted(programs.items()))}
        if options.output:
            options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
