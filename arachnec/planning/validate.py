"""What is wrong with a schedule: a checker that knows none of the schedulers.

For a pass author::

    problems = validate_schedule(module)   # [] when the module at level scheduled or placed is right
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

from arachnec.cost.model import CostModel
from arachnec.cost.strategy import sides_of
from arachnec.ir.nodes import Cascade, Level, Module, integers, quantity

TOLERANCE = 1e-6  # ms, and relative


def validate_schedule(module: Module) -> list[str]:
    """Every violation in words: illegal degree, too little time or memory, precedence, more ranks than there are."""
    cost = CostModel(module)
    named = {cascade.name: cascade for cascade in module.cascades}
    problems = [problem for cascade in module.cascades for problem in _cascade_problems(cascade, named, cost)]
    problems += _capacity_problems(module, cost)
    if module.level >= Level.PLACED:
        problems += [problem for cascade in module.cascades for problem in _rank_problems(cascade, cost)]
        problems += _overlaps(module)
    makespan = module.attrs.get("makespan")
    last = max((cascade.end for cascade in module.cascades), default=0.0)
    if makespan is None or abs(quantity(makespan) - last) > _slack(last):
        problems.append(f"the makespan is said to be {makespan}, the last cascade ends at {last} ms")
    return problems


def _cascade_problems(cascade: Cascade, named: dict[str, Cascade], cost: CostModel) -> list[str]:
    name, degree = f"%{cascade.name}", cascade.width
    legal = cost.legal_degrees(cascade)
    if degree not in legal:
        nearest = [*[d for d in legal if d < degree][-1:], *[d for d in legal if d > degree][:1]]
        return [f"{name}: degree {degree} is not legal, nearest are {' and '.join(map(str, nearest)) or 'none'}"]
    problems = []
    if cascade.start < 0:
        problems.append(f"{name} starts at {cascade.start} ms")
    listed = integers(cascade.attrs.get("ranks", ()))
    ranks = listed if len(listed) == degree and all(0 <= rank < cost.cluster.world for rank in listed) else None
    entry = cost.table.entry(cascade, degree, ranks, sides_of(cascade, cost.recomputed(cascade)))
    if cascade.end - cascade.start < entry.time - _slack(cascade.end):
        problems.append(f"{name} runs {cascade.end - cascade.start} ms and needs {entry.time} ms at degree {degree}")
    if entry.memory > cost.room_on(ranks, degree) + TOLERANCE:
        problems.append(f"{name} needs more memory than a rank has at degree {degree}")
    for producer in cascade.inputs:
        if producer not in named:
            problems.append(f"{name} reads %{producer}, which does not exist")
        elif cascade.start < named[producer].end - _slack(cascade.start):
            problems.append(f"{name} starts at {cascade.start} ms, before %{producer} ends at {named[producer].end} ms")
    return problems


def _capacity_problems(module: Module, cost: CostModel) -> list[str]:
    events = []
    for cascade in module.cascades:
        events.append((cascade.start, 1, cascade.width))
        events.append((cascade.end - _slack(cascade.end), 0, -cascade.width))
    busy = 0
    for moment, _, change in sorted(events):
        busy += change
        if busy > cost.cluster.world:
            return [f"{busy} ranks are needed at {moment} ms, there are {cost.cluster.world}"]
    return []


def _rank_problems(cascade: Cascade, cost: CostModel) -> list[str]:
    ranks = cascade.ranks
    problems = []
    if len(set(ranks)) != cascade.width:
        problems.append(f"%{cascade.name} has degree {cascade.width} and ranks {ranks}")
    if any(not 0 <= rank < cost.cluster.world for rank in ranks):
        problems.append(f"%{cascade.name} is on ranks {ranks} of {cost.cluster.world}")
    ulysses, ring = cascade.attrs.get("ulysses"), cascade.attrs.get("ring")
    if isinstance(ulysses, int) and isinstance(ring, int) and ulysses * ring != cascade.degree:
        problems.append(f"%{cascade.name}: ulysses {ulysses} times ring {ring} is not degree {cascade.degree}")
    return problems


def _overlaps(module: Module) -> list[str]:
    runs: dict[int, list[Cascade]] = defaultdict(list)
    for cascade in module.cascades:
        for rank in cascade.ranks:
            runs[rank].append(cascade)
    problems = []
    for rank, cascades in sorted(runs.items()):
        cascades.sort(key=lambda cascade: (cascade.start, cascade.end))
        for earlier, later in pairwise(cascades):
            if later.start < earlier.end - _slack(earlier.end):
                problems.append(f"rank {rank} is in %{earlier.name} and %{later.name} at {later.start} ms")
    return problems


def _slack(moment: float) -> float:
    return TOLERANCE * max(1.0, abs(moment))
