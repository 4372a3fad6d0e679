"""A block's graph with its fused regions written into it, each with the kernels that are fastest and what it saves.

A hand-written kernel for a part of a region makes the rest read and write memory again. The cost model weighs that; on
a tie the hand-written kernel is chosen. A generated kernel writes its part of a join along tokens in place; next to
hand-written kernels the join is one more copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache

import sympy

from arachnec.fusion.cost import Machine, Price, RegionCost, alone, together
from arachnec.fusion.graph import FusionGraph, Kind, bits, stem, values_read
from arachnec.fusion.match import biased_gelus, kernel_name, match_region
from arachnec.fusion.search import find_regions, left_alone, reasons
from arachnec.fusion.shape_constraints import LIKELY, Range, ShapeConstraints, constraints_of
from arachnec.fusion.walk import Match
from arachnec.ir.nodes import Fused, Graph
from arachnec.ir.values import Attributes, Formula, Term

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


GIB = 2**30


def fuse_graph(graph: Graph, likely: Mapping[str, Range] | None = None, bandwidth: float | None = None) -> Graph:
    """``graph`` with its fused regions. ``likely`` are the sizes the cost model sees, ``bandwidth`` is in bytes/s."""
    analysed = FusionGraph(graph, constraints_of(graph, LIKELY if likely is None else likely))
    cost = RegionCost(analysed, Machine() if bandwidth is None else Machine(bandwidth))
    regions = find_regions(analysed, cost)
    regions = sorted([*regions, *biased_gelus(analysed, regions)], key=lambda region: next(bits(region)))
    counts: Counter[str] = Counter()
    names = []
    for region in regions:
        schedule = cost.schedule(region)
        names.append(f"{schedule}_{counts[schedule]}")
        counts[schedule] += 1
    titled = list(zip(names, regions, strict=True))
    fused = [
        _fused(
            analysed, cost, name, region, reasons(analysed, cost, region, [pair for pair in titled if pair[0] != name])
        )
        for name, region in titled
    ]
    untouched = left_alone(analysed, cost, titled)
    return replace(graph, fused=tuple(fused), attrs=graph.attrs.updated(alone=untouched or None))


def _fused(graph: FusionGraph, cost: RegionCost, name: str, region: int, stopped: tuple[str, ...]) -> Fused:
    price = cost.price(region)
    assert isinstance(price, Price)
    matches = chosen_matches(cost, region)
    left_over = rest_of(graph, region, matches)
    parts = [*(match.ops for match in matches), *left_over]
    before, after = cost.formula(region)[0], sum(cost.formula(part)[1] for part in parts)
    single = {part for part in left_over if is_single(graph, part)}
    backward = [(alone if part in single else together)(cost, part, graph.bytes_of) for part in parts]
    separate = alone(cost, region, graph.bytes_of)
    # a layer that keeps its bias reads the whole gradient once more, to add it up
    biases = sum(graph.bytes_of(match.operands["x"]) for match in matches if match.splits)
    attrs = Attributes.of(
        schedule=cost.schedule(region),
        rows=cost.rows(region),
        kernel=kernel_name(graph, region, matches),
        bytes_before=_gib(before, graph.sizes),
        bytes_after=_gib(after, graph.sizes),
        backward_before=_gib(separate.moved + biases, graph.sizes),
        backward_after=_gib(sum(part.moved for part in backward), graph.sizes),
        kept_before=_gib(separate.saved, graph.sizes),
        kept_after=_gib(sum(part.saved for part in backward), graph.sizes),
        launches_before=price.launches_before,
        launches_after=len(matches) + sum(launches_of(cost, part) for part in left_over),
        registers=price.registers or None,
        stopped=stopped,
    )
    return Fused(name, tuple(graph.ops[i].name for i in bits(region)), attrs)


def _gib(size: sympy.Expr, sizes: ShapeConstraints) -> Formula:
    """Bytes as a polynomial in GiB; what is no polynomial is taken at its usual size."""
    size = sympy.expand(size)
    symbols = sorted(size.free_symbols, key=str)
    try:
        terms = sympy.Poly(size, *symbols).terms() if symbols else [((), size)]
        formula_terms = [
            Term(_short(float(factor)), tuple((s.name, int(p)) for s, p in zip(symbols, powers, strict=True)))
            for powers, factor in terms
        ]
    except (sympy.PolynomialError, TypeError, ValueError):
        formula_terms = [Term(_short(sizes.at(size)))]
    return Formula(tuple(formula_terms), "GiB")


def _short(value: float) -> float:
    return float(f"{value / GIB:.6g}")
