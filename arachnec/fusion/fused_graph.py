"""A block's graph with its fused regions written into it, each with its kernel and what it saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import sympy

from arachnec.fusion.cost import Machine, Price, RegionCost, alone, together
from arachnec.fusion.graph import FusionGraph, bits
from arachnec.fusion.match import biased_gelus, kernel_name
from arachnec.fusion.parts import chosen_matches, is_single, launches_of, rest_of
from arachnec.fusion.search import find_regions, left_alone, reasons
from arachnec.fusion.shape_constraints import LIKELY, Range, ShapeConstraints, constraints_of
from arachnec.ir.nodes import Fused, Graph
from arachnec.ir.values import Attributes, Formula, Term

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
