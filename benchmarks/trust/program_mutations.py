"""Lowered programs broken in one place: each is refused by ``check``, or shown to change nothing by executing it.

Instructions dropped, doubled, swapped, moved, or put on another rank; single tokens of the text changed: numbers,
lists, names, operations, peers, attributes left out. A program that is accepted is executed on small tensors, and must
compute what the reference does. Execution says nothing of memory: of a drawn program, which claims exactly what it
needs, one that claims less and is accepted counts as a survivor.

    python benchmarks/trust/program_mutations.py --mutations 300 -o benchmarks/results/program_mutations.json
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arachnec.equivalence.compare import demand_equivalent
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Module
from arachnec.ir.parser import parse_module
from arachnec.ir.printer import print_module
from arachnec.ir.verify import verify
from arachnec.passes.check import find_problems
from benchmarks.trust.random_programs import random_program

GOLDEN = Path(__file__).parents[2] / "tests" / "golden"
NAMED = (
    "valid", "buckets_valid", "cells_valid", "heads_valid", "host_valid", "tied_stages_valid", "updates_gathered_valid",
)  # fmt: skip
LOWERED = (
    "lower/cells", "lower/host_memory", "lower/sparse_heads",
    "schedule_pipeline/a_degree_for_each_stage", "schedule_pipeline/stages_in_cells", "stages/sparse_parts",
    "shard_optimizer/over_the_ranks_of_a_stage",
)  # fmt: skip
SECONDS = 25.0  # until a program that stands still is given up
HELD = re.compile(r"\b(memory|workspace|state|host|host_state|from_host|to_host) = ([\d.e+-]+)")
TOKEN = re.compile(r"%\w+|\b\d+(?:\.\d+)?(?:e[+-]?\d+)?\b|\btrue\b|\bfalse\b")
ATTRIBUTE = re.compile(r"\w+ = (?:\[[^{}]*?\]|\"[^\"]*\"|[^,{}\[\]]+?)(?:, | (?=\}))")
OPERATION = re.compile(r"^ +(encode|forward|backward|weight|send|receive|gather|reduce|norm|step|free)\b")
OPERATIONS = ("encode", "forward", "backward", "send", "receive", "reduce", "norm", "step", "free")
Rows = list[str]


def rows_of(module: Module) -> Rows:
    """A module's lines, each with all of its attributes: what the printer wraps is one line."""
    rows: Rows = []
    wrapped = False
    for row in print_module(module).splitlines():
        if wrapped:
            rows[-1] += " }" if row.strip() == "}" else f" {row.strip()}"
            wrapped = row.strip() != "}"
        else:
            rows.append(row)
            wrapped = row.endswith("{") and not row.startswith(("module", "  program"))
    return [row.replace(", }", " }") for row in rows]


def in_programs(rows: Rows) -> list[int]:
    """The numbers of the lines that are instructions."""
    first = next(number for number, row in enumerate(rows) if row.startswith("  program rank"))
    return [number for number, row in enumerate(rows) if number > first and OPERATION.match(row)]


def named_lines(rows: Rows) -> list[int]:
    """Those of clips, cascades, instructions and what a rank holds."""
    starts = ("  clip ", "  %", "  program rank")
    return [number for number, row in enumerate(rows) if row.startswith(starts)] + in_programs(rows)


def drop(rows: Rows, rng: random.Random) -> None:
    del rows[rng.choice(in_programs(rows))]


def double(rows: Rows, rng: random.Random) -> None:
    at = rng.choice(in_programs(rows))
    rows.insert(at, rows[at])


def swap(rows: Rows, rng: random.Random) -> None:
    own = in_programs(rows)
    at = rng.choice([number for number in own if number + 1 in own] or own)
    rows[at], rows[at + 1] = rows[at + 1], rows[at]


def move(rows: Rows, rng: random.Random) -> None:
    at, to = rng.choice(in_programs(rows)), rng.choice(in_programs(rows))
    rows.insert(to, rows.pop(at))


def copy(rows: Rows, rng: random.Random) -> None:
    at, to = rng.choice(in_programs(rows)), rng.choice(in_programs(rows))
    rows.insert(to, rows[at])


def other_operation(rows: Rows, rng: random.Random) -> None:
    at = rng.choice(in_programs(rows))
    rows[at] = OPERATION.sub(lambda hit: hit[0].replace(hit[1], rng.choice(OPERATIONS)), rows[at])


def other_token(rows: Rows, rng: random.Random) -> None:
    at = rng.choice(named_lines(rows))
    tokens = list(TOKEN.finditer(rows[at]))
    if tokens:
        hit = rng.choice(tokens)
        rows[at] = rows[at][: hit.start()] + _other(hit[0], rows, rng) + rows[at][hit.end() :]


def _other(token: str, rows: Rows, rng: random.Random) -> str:
    if token.startswith("%"):
        return rng.choice(sorted({name for row in rows for name in re.findall(r"%\w+", row)}))
    if token in ("true", "false"):
        return "false" if token == "true" else "true"
    if re.fullmatch(r"\d+", token):
        return str(rng.choice((int(token) + 1, max(0, int(token) - 1), 2 * int(token), 0)))
    return repr(float(token) * rng.choice((0.0, 0.5, 2.0)))


def other_list(rows: Rows, rng: random.Random) -> None:
    """An element of a list left out, doubled, or two of them swapped."""
    at = rng.choice(named_lines(rows))
    lists = list(re.finditer(r"\[[^\[\]]+\]", rows[at]))
    if not lists:
        return
    hit = rng.choice(lists)
    items = [item for part in hit[0][1:-1].split(",") for item in _expanded(part.strip())]
    kind, place = rng.choice(("drop", "double", "swap")), rng.randrange(len(items))
    if kind == "drop":
        del items[place]
    elif kind == "double":
        items.insert(place, items[place])
    else:
        other = rng.randrange(len(items))
        items[place], items[other] = items[other], items[place]
    rows[at] = rows[at][: hit.start()] + f"[{', '.join(items)}]" + rows[at][hit.end() :]


def _expanded(item: str) -> list[str]:
    ends = re.fullmatch(r"(\d+)\.\.(\d+)", item)
    return [item] if ends is None else [str(number) for number in range(int(ends[1]), int(ends[2]) + 1)]


def left_out(rows: Rows, rng: random.Random) -> None:
    at = rng.choice(named_lines(rows))
    attributes = list(ATTRIBUTE.finditer(rows[at]))
    if attributes:
        hit = rng.choice(attributes)
        rows[at] = rows[at][: hit.start()] + rows[at][hit.end() :]


def from_elsewhere(rows: Rows, rng: random.Random) -> None:
    """An attribute with the value that it has in another line."""
    at = rng.choice(named_lines(rows))
    attributes = list(ATTRIBUTE.finditer(rows[at]))
    if not attributes:
        return
    hit = rng.choice(attributes)
    name = hit[0].split(" = ")[0]
    others = [other[0] for row in rows for other in ATTRIBUTE.finditer(row) if other[0].startswith(f"{name} = ")]
    rows[at] = rows[at][: hit.start()] + rng.choice(others) + rows[at][hit.end() :]


MUTATIONS: tuple[Callable[[Rows, random.Random], None], ...] = (
    drop, double, swap, move, copy, other_operation, other_token, other_token, other_token, other_list, left_out,
    from_elsewhere,
)  # fmt: skip


def judged(before: Module, text: str, *, execute: bool = True) -> tuple[str, str]:
    """What became of a mutation: refused, unchanged, harmless or SURVIVES; and by what. ``accepted`` if not to be
    executed."""
    try:
        module = parse_module(text, "mutation")
        problems = verify(module) or find_problems(module)
    except UserError as error:
        problems = error.diagnostics
    if problems:
        return "refused", type(problems[0]).__name__
    if module == before:
        return "unchanged", ""
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
    """Whether one line claims less than before; lines that are not in both do not count."""
    pairs = [(a, b) for a, b in zip(before, after, strict=False) if a != b]
    if len(pairs) != 1 or len(before) != len(after):
        return False
    held = [dict(HELD.findall(row)) for row in pairs[0]]
    return any(float(held[1].get(name, 0.0)) < float(value) for name, value in held[0].items())


def sources(seed: int, count: int) -> dict[str, Module]:
    golden = {name: parse_module((GOLDEN / "check" / f"{name}.cascade").read_text(), name) for name in NAMED}
    golden |= {name: parse_module((GOLDEN / f"{name}.expect").read_text(), name) for name in LOWERED}
    drawn = {f"random_{n}": random_program(random.Random(f"{seed}/{n}"), ranks=4) for n in range(count)}
    return golden | {name: module for name, module in drawn.items() if len(module.programs) > 1}


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
