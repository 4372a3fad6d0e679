"""Deadlock three ways: every interleaving of a program's ranks, Z3, and ``check``. They must agree on every program.

Small random programs, of whole models and of stages, cells and host memory, most of them with instructions moved,
dropped or doubled. Host by host, every send waits for its
receive and every collective for its members, which is what ``check`` proves.

    python -m benchmarks.trust.interleavings --programs 1000 -o benchmarks/results/interleavings.json
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter, defaultdict, deque
from dataclasses import replace
from pathlib import Path

import z3

from arachnec.analysis.communicators import HOST_HANDOFFS
from arachnec.analysis.uses import Values, bucket_of, overlapped_reduces
from arachnec.ir.nodes import Instruction, Module, Program
from arachnec.verification.deadlock import check_deadlock
from benchmarks.trust.random_layouts import random_layout
from benchmarks.trust.random_programs import random_program

Meeting = tuple[str, object, tuple[int, ...]]  # kind, what, and who must come; of a handoff the sender first
Lists = list[list[Meeting]]
LEAST, MOST = 8, 120  # meetings of a program, counted on each of its ranks
LAYOUTS = 0.3  # of the programs


def meetings(module: Module) -> Lists:
    """What every rank's host waits for, in its order."""
    return [list(_of(program)) for program in sorted(module.programs, key=lambda program: program.rank)]


def _of(program: Program) -> list[Meeting]:
    inside = overlapped_reduces(program)
    early = {number for numbers in inside.values() for number in numbers}
    listed: list[Meeting] = []
    for index, step in enumerate(program.instructions):
        if step.op == "send":
            listed.append(("handoff", step.target, (program.rank, step.peers[0])))
        elif step.op == "receive":
            listed.append(("handoff", step.target, (step.peers[0], program.rank)))
        elif index not in early:
            for number in inside.get(index, ()):  # a backward goes on behind a reduce that starts inside it
                reduce = program.instructions[number]
                listed += [_collective(step, ("until", bucket_of(reduce))), _collective(reduce)]
            listed.append(_collective(step))
    return [meeting for meeting in listed if len(meeting[2]) > 1]


def _collective(step: Instruction, part: object = None) -> Meeting:
    bucket = bucket_of(step) if step.op == "reduce" else None
    return step.op, (step.target, bucket, part), step.peers


def stands_still(lists: Lists) -> tuple[bool, int]:
    """Whether some interleaving does not come to the end of all lists, or swaps data; and the states that were seen."""
    start = (0,) * len(lists)
    seen, todo = {start}, deque([start])
    bad = False
    while todo:
        state = todo.popleft()
        heads = [own[at] if at < len(own) else None for own, at in zip(lists, state, strict=True)]
        enabled: set[tuple[int, ...]] = set()
        for rank, head in enumerate(heads):
            if head is None:
                continue
            kind, what, members = head
            if kind == "handoff":
                other = heads[members[0] if members[1] == rank else members[1]]
                if other is not None and other[0] == "handoff" and other[2] == members:
                    bad = bad or other[1] != what
                    enabled.add(members)
            elif rank in members and all(heads[member] == head for member in members):
                enabled.add(members)
        if not enabled and any(head is not None for head in heads):
            bad = True
        for members in enabled:
            following = tuple(at + (rank in members) for rank, at in enumerate(state))
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return bad, len(seen)


def no_order(lists: Lists) -> bool:
    """Whether Z3 finds no times at which all meetings can happen, each at one time on all of its ranks."""
    solver = z3.Solver()
    times: dict[object, z3.ArithRef] = {}
    comes: dict[object, set[int]] = defaultdict(set)
    names: dict[object, dict[int, object]] = defaultdict(dict)
    for rank, own in enumerate(lists):
        counts: Counter[object] = Counter()
        before = None
        for kind, what, members in own:
            stream = (kind, members) if kind == "handoff" else (kind, what, members)
            key = (*stream, counts[stream])
            counts[stream] += 1
            names[key][rank] = what
            comes[key].add(rank)
            now = times.setdefault(key, z3.Int(str(len(times))))
            if before is not None:
                solver.add(now > before)
            before = now
    if any(comes[key] != set(key[1] if key[0] == "handoff" else key[2]) for key in comes):  # type: ignore[index]
        return True
    if any(len(set(said.values())) > 1 for said in names.values()):
        return True
    return bool(solver.check() == z3.unsat)


def refused(module: Module) -> bool:
    return any(check_deadlock(Values(module), HOST_HANDOFFS, {}))


def drawn(rng: random.Random) -> Module:
    return random_layout(rng)[1] if rng.random() < LAYOUTS else random_program(rng, ranks=4, most=5)


def broken(module: Module, rng: random.Random) -> Module:
    """A few instructions moved on a rank, dropped or doubled; or none."""
    lists = {program.rank: list(program.instructions) for program in module.programs}
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        own = lists[rng.choice([rank for rank, steps in lists.items() if steps])]
        at = rng.randrange(len(own))
        kind = rng.choice(("move", "move", "move", "swap", "drop", "double"))
        if kind == "move":
            step = own.pop(at)
            own.insert(rng.randint(0, len(own)), step)
        elif kind == "swap" and at + 1 < len(own):
            own[at], own[at + 1] = own[at + 1], own[at]
        elif kind == "drop" and len(own) > 1:
            del own[at]
        else:
            own.insert(rng.randint(0, len(own)), own[at])
    programs = tuple(replace(p, instructions=tuple(lists[p.rank])) for p in module.programs)
    return replace(module, programs=programs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    started = time.process_time()
    stuck = states = 0
    apart = []
    for number in range(options.programs):
        rng = random.Random(f"{options.seed}/{number}")
        whole = drawn(rng)
        while not LEAST <= sum(map(len, meetings(whole))) <= MOST:
            whole = drawn(rng)
        module = broken(whole, rng)
        lists = meetings(module)
        explored, seen = stands_still(lists)
        states += seen
        stuck += explored
        said = {"explorer": explored, "z3": no_order(lists), "check": refused(module)}
        if len(set(said.values())) > 1:
            apart.append({"program": number, **said})
            print(f"program {number}: {said}", flush=True)
    result = {
        "programs": options.programs,
        "seed": options.seed,
        "stand_still": stuck,
        "states": states,
        "disagree": apart,
        "cpu_s": round(time.process_time() - started, 1),
    }
    print(json.dumps(result))
    if options.output:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
