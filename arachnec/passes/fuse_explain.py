"""Why a region did not grow: one sentence for each kind of neighbour, with their names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from arachnec.passes.fuse_cost import RegionCost
from arachnec.passes.fuse_graph import FusionGraph, bits

SHOWN = 4  # names in one sentence


def reasons(graph: FusionGraph, cost: RegionCost, region: int, others: Sequence[tuple[str, int]]) -> tuple[str, ...]:
    """``others`` are the other regions with their names."""
    sentences: dict[str, list[str]] = {}
    for i in _neighbours(graph, region):
        name = f"`%{graph.ops[i].name}`"
        if not graph.core >> i & 1:
            way = "reads its result" if graph.above[i] & region else "makes what it reads"
            sentences.setdefault(f"{way}: {graph.kinds[i].value}", []).append(name)
            continue
        title, other = next(((f"@{title}", mask) for title, mask in others if mask >> i & 1), (name, 1 << i))
        sentences.setdefault(_against(graph, cost, region, other), []).append(title)
    results = [f"`%{graph.ops[i].name}`" for i in bits(region) if graph.results >> i & 1]
    if results:
        sentences.setdefault("leaves the graph", []).extend(results)
    return tuple(f"{_listed(names)}: {sentence}" for sentence, names in sentences.items())


def _neighbours(graph: FusionGraph, region: int) -> Iterator[int]:
    """Operations, no views, that make what the region reads or read what it makes."""
    found: dict[int, None] = {}
    for i in bits(region & graph.core):
        found |= dict.fromkeys(p for p in graph.producers(i) if not region >> p & 1)
    for i in bits(region & graph.core):
        found |= dict.fromkeys(c for c in graph.consumers(i) if not region >> c & 1)
    return iter(found)


def _against(graph: FusionGraph, cost: RegionCost, region: int, other: int) -> str:
    """What speaks against one kernel for both."""
    price = cost.price(graph.with_views(region | other))
    if isinstance(price, str):
        return f"not together, {price}"
    gain = price.saved - cost.saved(region) - (cost.saved(other) if other.bit_count() > 1 else 0.0)
    return "together they save nothing more" if gain <= 0 else "another choice of regions saves more in all"


def _listed(names: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(names))
    more = f" and {len(distinct) - SHOWN} more" if len(distinct) > SHOWN else ""
    return ", ".join(distinct[:SHOWN]) + more
