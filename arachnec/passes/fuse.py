"""Find the memory-intensive operations of each block's graph that are worth one kernel, and write them into the graph.

FusionStitching (arXiv 2009.10924) for symbolic shapes as in DISC (2103.05288); ``docs/fusion.md`` says how. Nothing is
looked up by the name of a model: regions are found, and then compared with what the hand-written kernels compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from arachnec.cluster.device_specs import find_device_specs
from arachnec.ir.nodes import Fused, Graph, Level, Module
from arachnec.ir.values import Attributes, Formula, Term
from arachnec.passes.infra.base import Pass, Scope

if TYPE_CHECKING:
    import sympy

    from arachnec.fusion.cost import RegionCost
    from arachnec.fusion.graph import FusionGraph
    from arachnec.fusion.shape_constraints import Range, ShapeConstraints

GIB = 2**30


@dataclass(frozen=True)
class Fuse(Pass):
    """Group the memory-intensive operations of every graph into regions that run as one kernel."""

    needs: ClassVar[Level] = Level.TRACED
    gives: ClassVar[Level] = Level.TRACED
    scope: ClassVar[Scope] = Scope.MODEL

    def run(self, module: Module) -> Module:
        from arachnec.fusion.shape_constraints import likely_sizes

        likely = likely_sizes(module)
        sheet = None if module.cluster is None else find_device_specs(str(module.cluster.attrs.get("device", "")))
        bandwidth = None if sheet is None else sheet.bandwidth * 1e9
        return replace(module, graphs=tuple(fuse_graph(graph, likely, bandwidth) for graph in module.graphs))


def fuse_graph(graph: Graph, likely: Mapping[str, Range] | None = None, bandwidth: float | None = None) -> Graph:
    """``graph`` with its fused regions. ``likely`` are the sizes the cost model sees, ``bandwidth`` is in bytes/s."""
    from arachnec.fusion.cost import Machine, RegionCost
    from arachnec.fusion.explain import left_alone, reasons
    from arachnec.fusion.graph import FusionGraph, bits
    from arachnec.fusion.match import biased_gelus
    from arachnec.fusion.search import find_regions
    from arachnec.fusion.shape_constraints import LIKELY, constraints_of

    known = FusionGraph(graph, constraints_of(graph, LIKELY if likely is None else likely))
    cost = RegionCost(known, Machine() if bandwidth is None else Machine(bandwidth))
    regions = find_regions(known, cost)
    regions = sorted([*regions, *biased_gelus(known, regions)], key=lambda region: next(bits(region)))
    counts: Counter[str] = Counter()
    names = []
    for region in regions:
        schedule = cost.schedule(region)
        names.append(f"{schedule}_{counts[schedule]}")
        counts[schedule] += 1
    titled = list(zip(names, regions, strict=True))
    fused = [
        _fused(known, cost, name, region, reasons(known, cost, region, [pair for pair in titled if pair[0] != name]))
        for name, region in titled
    ]
    alone = left_alone(known, cost, titled)
    return replace(graph, fused=tuple(fused), attrs=graph.attrs.updated(alone=alone or None))


def _fused(graph: FusionGraph, cost: RegionCost, name: str, region: int, stopped: tuple[str, ...]) -> Fused:
    from arachnec.fusion.backward import alone, together
    from arachnec.fusion.cost import Price
    from arachnec.fusion.graph import bits
    from arachnec.fusion.match import kernel_name
    from arachnec.fusion.parts import chosen_matches, is_single, launches_of, rest_of

    price = cost.price(region)
    assert isinstance(price, Price)
    matches = chosen_matches(cost, region)
    rest = rest_of(graph, region, matches)
    parts = [*(match.ops for match in matches), *rest]
    before, after = cost.formula(region)[0], sum(cost.formula(part)[1] for part in parts)
    single = {part for part in rest if is_single(graph, part)}
    backward = [(alone if part in single else together)(cost, part, graph.bytes_of) for part in parts]
    many = alone(cost, region, graph.bytes_of)
    # a layer that keeps its bias reads the whole gradient once more, to add it up
    biases = sum(graph.bytes_of(match.operands["x"]) for match in matches if match.splits)
    attrs = Attributes.of(
        schedule=cost.schedule(region),
        rows=cost.rows(region),
        kernel=kernel_name(graph, region, matches),
        bytes_before=_gib(before, graph.sizes),
        bytes_after=_gib(after, graph.sizes),
        backward_before=_gib(many.moved + biases, graph.sizes),
        backward_after=_gib(sum(part.moved for part in backward), graph.sizes),
        kept_before=_gib(many.saved, graph.sizes),
        kept_after=_gib(sum(part.saved for part in backward), graph.sizes),
        launches_before=price.launches_before,
        launches_after=len(matches) + sum(launches_of(cost, part) for part in rest),
        registers=price.registers or None,
        stopped=stopped,
    )
    return Fused(name, tuple(graph.ops[i].name for i in bits(region)), attrs)


def _gib(size: sympy.Expr, sizes: ShapeConstraints) -> Formula:
    """Bytes as a polynomial in GiB; what is no polynomial is taken at its usual size."""
    import sympy

    size = sympy.expand(size)
    symbols = sorted(size.free_symbols, key=str)
    try:
        terms = sympy.Poly(size, *symbols).terms() if symbols else [((), size)]
        found = [
            Term(_short(float(factor)), tuple((s.name, int(p)) for s, p in zip(symbols, powers, strict=True)))
            for powers, factor in terms
        ]
    except (sympy.PolynomialError, TypeError, ValueError):
        found = [Term(_short(sizes.at(size)))]
    return Formula(tuple(found), "GiB")


def _short(value: float) -> float:
    return float(f"{value / GIB:.6g}")
