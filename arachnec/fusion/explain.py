"""Explanations of a fusion plan: why a region did not grow, and why an operation is in none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from arachnec.fusion.cost import RegionCost
from arachnec.fusion.graph import FusionGraph, bits
from arachnec.fusion.search import waits_for_itself

SHOWN = 4  # names in one sentence


def reasons(graph: FusionGraph, cost: RegionCost, region: int, others: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """One sentence for each kind of neighbour of ``region``; ``others`` are the other regions with their names."""
    sentences: dict[tuple[str, str], list[str]] = {}
    for i in _neighbours(graph, region):
        name = f"`%{graph.ops[i].name}`"
        if not graph.core >> i & 1:
            way = "read its result" if graph.above[i] & region else "make what it reads"
            sentences.setdefault((way, graph.kinds[i].value), []).append(name)
            continue
        title, other = next(((f"@{title}", mask) for title, mask in others if mask >> i & 1), (name, 1 << i))
        sentences.setdefault(
            ("not with", _against(graph, cost, region, other, [mask for _, mask in others])), []
        ).append(title)
    results = [f"`%{graph.ops[i].name}`" for i in bits(region) if graph.results >> i & 1]
    if results:
        sentences.setdefault(("leave the graph", ""), []).extend(results)
    return tuple(_sentence(way, why, names) for (way, why), names in sentences.items())


def left_alone(graph: FusionGraph, cost: RegionCost, regions: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """Why each operation that could share a kernel is in no region."""
    taken = sum(region for _, region in regions)
    sentences: dict[str, list[str]] = {}
    for i in bits(graph.core & ~taken):
        neighbours = reasons(graph, cost, graph.with_views(1 << i), regions)
        against = [reason for reason in neighbours if reason.startswith("not with ")]
        why = "; ".join(against) or "nothing beside it could share its kernel"
        sentences.setdefault(why, []).append(f"`%{graph.ops[i].name}`")
    return tuple(f"{_listed(names)}: {why}" for why, names in sentences.items())


def _neighbours(graph: FusionGraph, region: int) -> Iterator[int]:
    """Operations, no views, that make what the region reads or read what it makes."""
    neighbours: dict[int, None] = {}
    for i in bits(region & graph.core):
        neighbours |= dict.fromkeys(p for p in graph.producers(i) if not region >> p & 1)
    for i in bits(region & graph.core):
        neighbours |= dict.fromkeys(c for c in graph.consumers(i) if not region >> c & 1)
    return iter(neighbours)


def _against(graph: FusionGraph, cost: RegionCost, region: int, other: int, regions: Sequence[int]) -> str:
    """Why the two are not one kernel."""
    both = graph.with_views(region | other)
    price = cost.price(both)
    if isinstance(price, str):
        return price
    gain = price.saved - cost.saved(region) - (cost.saved(other) if other.bit_count() > 1 else 0.0)
    if gain <= 0:
        return "it would save nothing more"
    if waits_for_itself(graph, [both, *(mask for mask in regions if not mask & both)]):
        return "it would wait for a region that waits for it"
    return "another choice of regions saves more in all"


def _sentence(way: str, why: str, names: Sequence[str]) -> str:
    names = list(dict.fromkeys(names))
    if way == "not with":
        return f"{way} {_listed(names)}: {why}"
    if len(names) == 1:
        way = {"read its result": "reads its result", "make what it reads": "makes what it reads"}.get(
            way, "leaves the graph"
        )
    return f"{_listed(names)} {way}" + (f": {why}" if why else "")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
