"""How a region runs: hand-written kernels with what they leave over, or one generated kernel, whichever takes less.

A kernel that stands for a part of a region alone makes the rest read and write memory again. The cost model weighs
that; where both move as much, the hand-written kernel stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from arachnec.passes.fusion.cost import RegionCost
from arachnec.passes.fusion.graph import FusionGraph, bits
from arachnec.passes.fusion.match import match_region
from arachnec.passes.fusion.ops import Kind
from arachnec.passes.fusion.walk import Match

FLOATING = ("f64", "f32", "f16", "bf16")
# A generated kernel is taken to need so much longer for the same bytes: lanes are idle, vectors are read with each row.
GENERATED = 1.1


def chosen_matches(cost: RegionCost, region: int) -> tuple[Match, ...]:
    """The hand-written kernels that ``region`` calls; none where one kernel for all of it is faster."""
    graph = cost.graph
    matches = match_region(graph, region)
    rest = rest_of(graph, region, matches)
    left_over = any(graph.kinds[i] is not Kind.JOIN for part in rest for i in bits(part & graph.core))
    if not matches or not left_over or not _is_one_program(cost, region):
        return matches
    by_hand = sum(cost.seconds(match.ops) for match in matches) + GENERATED * sum(map(cost.seconds, rest))
    return matches if by_hand <= GENERATED * cost.seconds(region) else ()


def rest_of(graph: FusionGraph, region: int, matches: tuple[Match, ...]) -> tuple[int, ...]:
    """What ``matches`` leave over, in kernels: those over the same rows with no match or join between them are one."""
    if not matches:
        return (region,)
    unit = {i: number for number, match in enumerate(matches) for i in bits(match.ops)}

    @cache
    def depth(i: int) -> int:
        """Matches and joins on the longest way to an operation."""
        members = bits(matches[unit[i]].ops) if i in unit else iter([i])
        return max((depth(p) + _ends(p) for p in _sources(members)), default=0)

    def _ends(i: int) -> bool:
        return i in unit or graph.kinds[i] is Kind.JOIN

    def _sources(members: Iterator[int]) -> Iterator[int]:
        inside = set(members)
        return (p for i in inside for p in graph.producers(i) if region >> p & 1 and p not in inside)

    groups: dict[tuple[object, ...], int] = {}
    for i in bits(region & graph.core):
        if i not in unit:
            key = (i,) if graph.kinds[i] is Kind.JOIN else (depth(i), str(graph.spaces[i].rows))
            groups[key] = groups.get(key, 0) | 1 << i
    taken = sum(match.ops for match in matches)
    return tuple(graph.with_views(group) & region & ~taken for group in groups.values())


def _is_one_program(cost: RegionCost, region: int) -> bool:
    """Whether a template makes one kernel of the region: rows of one length, of floating-point numbers."""
    graph = cost.graph
    values = [*cost.loaded(region), *(graph.ops[i].name for i in bits(region & graph.core))]
    if any(graph.dtypes.get(name) not in FLOATING for name in values):
        return False
    rows = {graph.spaces[i].rows for group in cost.groups(region) if not group.broadcast for i in group.ops}
    return len(rows) == 1 and cost.launches(region) == 1
