"""The kernels of a region: hand-written ones and what they leave over, or one generated kernel, whichever is faster.

A hand-written kernel for a part of a region makes the rest read and write memory again. The cost model weighs that; on
a tie the hand-written kernel is chosen. A generated kernel writes its part of a join along tokens in place; next to
hand-written kernels the join is one more copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import sympy

from arachnec.fusion.cost import RegionCost
from arachnec.fusion.graph import FusionGraph, bits
from arachnec.fusion.match import match_region
from arachnec.fusion.ops import Kind, stem, values_read
from arachnec.fusion.walk import Match

FLOATING = ("f64", "f32", "f16", "bf16")
# A generated kernel is taken to need so much longer for the same bytes: lanes are idle, vectors are read with each row.
GENERATED = 1.1


def chosen_matches(cost: RegionCost, region: int) -> tuple[Match, ...]:
    """The hand-written kernels that ``region`` calls; none where generated kernels for all of it are faster."""
    graph = cost.graph
    matches = match_region(graph, region)
    rest = rest_of(graph, region, matches)
    if not matches or not any(part & graph.core for part in rest) or not _is_covered(cost, region):
        return matches
    by_hand = sum(cost.seconds(match.ops) for match in matches) + sum(_seconds(cost, part) for part in rest)
    return matches if by_hand <= _seconds(cost, region) else ()


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


def launches_of(cost: RegionCost, part: int) -> int:
    """Launches of ``part`` without hand-written kernels: one for each set of rows, which joins along tokens cut."""
    graph = cost.graph
    if is_single(graph, part):
        return cost.launches(part)
    cut = _cut_rows(graph, part)
    kernels = set[tuple[sympy.Expr, sympy.Expr]]()
    for i in (i for i in bits(part & graph.core) if graph.escapes(i, part)):
        space = graph.spaces[i]
        tokens, clips = space.rows.as_coeff_Mul()  # tokens of constant number are lanes where nothing cuts them
        uncut = cut[i] == {space.rows}
        kernels |= {(clips, space.width * tokens)} if uncut else {(rows, space.width) for rows in cut[i]}
    return max(cost.launches(part), len(kernels))


def is_single(graph: FusionGraph, part: int) -> bool:
    """Whether ``part`` is one operation, which runs as PyTorch has it."""
    return (part & graph.core).bit_count() == 1


def _seconds(cost: RegionCost, part: int) -> float:
    """One forward and backward of ``part`` in generated kernels, or as PyTorch's own operation."""
    factor = 1.0 if is_single(cost.graph, part) else GENERATED
    return factor * cost.seconds(part, launches_of(cost, part))


def _cut_rows(graph: FusionGraph, part: int) -> dict[int, frozenset[sympy.Expr]]:
    """For each operation the rows of the kernels that make it: its own, or those of the parts joined above it."""
    cut: dict[int, frozenset[sympy.Expr]] = {}
    for i in bits(part & graph.core):
        rows, pieces = graph.spaces[i].rows, set[sympy.Expr]()
        for name in values_read(graph.ops[i]):
            read, producer = graph.rows_of(name), graph.index.get(graph.base(name), -1)
            if graph.kinds[i] is Kind.JOIN and read != rows:
                written_over = "scatter" in stem(graph.ops[i])
                pieces |= {read, sympy.expand(rows - read)} if written_over else {read}
            elif producer in cut and read == rows == graph.spaces[producer].rows:
                pieces |= cut[producer] - {rows}
        cut[i] = frozenset(pieces or {rows})
    return cut


def _is_covered(cost: RegionCost, region: int) -> bool:
    """Whether the templates make kernels of the region: floating-point numbers, no sums over rows."""
    graph = cost.graph
    values = [*cost.loaded(region), *(graph.ops[i].name for i in bits(region & graph.core))]
    if any(graph.dtypes.get(name) not in FLOATING for name in values):
        return False
    return all(group.launches <= 1 for group in cost.groups(region))
