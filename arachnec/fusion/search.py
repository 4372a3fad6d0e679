"""The search for regions. In: a graph and its cost model. Out: disjoint regions, and why they did not grow.

After Zheng et al., "FusionStitching" (arXiv 2009.10924). Dynamic programming from the graph's results to its inputs:
every operation keeps its best few regions, made of itself and the regions of its readers. Beam search over all
operations picks disjoint ones. Equal regions that read one tensor and do not depend on each other are then merged.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from arachnec.fusion.cost import RegionCost
from arachnec.fusion.graph import FusionGraph, Kind, bits

CANDIDATES = 6  # regions kept for each operation
BEAM = 8  # sets of regions kept while choosing


def find_regions(graph: FusionGraph, cost: RegionCost) -> list[int]:
    """Disjoint regions of two or more kernels that save time, in the order of the graph. None waits for itself."""
    candidates = _candidates(graph, cost)
    chosen = _choose(graph, cost, candidates)
    return sorted(_grown(graph, cost, _packed(graph, cost, chosen)), key=lambda region: next(bits(region)))


def _candidates(graph: FusionGraph, cost: RegionCost) -> dict[int, list[int]]:
    """For each core operation, from the last to the first, its best regions that begin with it."""
    candidates: dict[int, list[int]] = {}
    for i in reversed(list(bits(graph.core))):
        grown = [1 << i]
        for reader in dict.fromkeys(graph.consumers(i)):
            if reader in candidates:
                unions = [x | region for x in grown for region in candidates[reader]]
                grown = _best([*grown, *unions], cost, keep=4 * CANDIDATES)
        completed = [_completed(graph, cost, region) for region in grown]
        candidates[i] = _best([1 << i, *(region for region in completed if region)], cost, CANDIDATES)
    return candidates


def _best(regions: Iterable[int], cost: RegionCost, keep: int) -> list[int]:
    """Those that save most. Unfinished ones, which are no kernel yet, stay by size: others may complete them."""
    distinct = dict.fromkeys(regions)
    return sorted(distinct, key=lambda region: (cost.saved(region), region.bit_count()), reverse=True)[:keep]


def _completed(graph: FusionGraph, cost: RegionCost, region: int) -> int:
    """``region`` with what stands between its operations, and producers that are worth it; 0 if that cannot be."""
    region = graph.with_views(region)
    back = graph.between(region)
    if back & ~(graph.core | graph.views):
        return 0
    region = graph.with_views(region | back)
    while True:
        better = max(_absorbing(graph, region), key=cost.saved, default=0)
        if not better or cost.saved(better) <= cost.saved(region):
            return region if cost.saved(region) > float("-inf") else 0
        region = better


def _absorbing(graph: FusionGraph, region: int) -> Iterator[int]:
    """``region`` with one more operation that makes what it reads."""
    producers = {p for i in bits(region & graph.core) for p in graph.producers(i)}
    for p in producers:
        if graph.core >> p & 1 and not region >> p & 1:
            yield graph.with_views(region | 1 << p)


@dataclass(frozen=True)
class _Choice:
    regions: tuple[int, ...]
    taken: int
    saved: float


def _choose(graph: FusionGraph, cost: RegionCost, candidates: dict[int, list[int]]) -> tuple[int, ...]:
    beam = [_Choice((), 0, 0.0)]
    for i in bits(graph.core):
        following = {choice.regions: choice for choice in beam}
        for choice in beam:
            for region in candidates[i]:
                if (region & graph.core).bit_count() < 2 or region & choice.taken or cost.saved(region) <= 0:
                    continue
                regions = tuple(sorted((*choice.regions, region)))
                if regions not in following and not waits_for_itself(graph, regions):
                    following[regions] = _Choice(regions, choice.taken | region, choice.saved + cost.saved(region))
        beam = sorted(following.values(), key=lambda choice: (-choice.saved, choice.regions))[:BEAM]
    return beam[0].regions


def waits_for_itself(graph: FusionGraph, regions: Iterable[int]) -> bool:
    """Whether regions that are valid one by one would depend on each other in a cycle."""
    chosen = list(regions)
    above = [functools.reduce(operator.or_, (graph.above[i] for i in bits(region)), 0) & ~region for region in chosen]
    reads = [{j for j, other in enumerate(chosen) if j != k and above[k] & other} for k in range(len(chosen))]
    waiting = set(range(len(chosen)))
    while ready := [k for k in waiting if not reads[k] & waiting]:
        waiting -= set(ready)
    return bool(waiting)


def _packed(graph: FusionGraph, cost: RegionCost, regions: Iterable[int]) -> list[int]:
    """Alike regions that read one tensor (queries and keys, the table of rotary positions) become one kernel."""
    packed = list(regions)
    for a, b in combinations(list(packed), 2):
        if a not in packed or b not in packed or _shape(graph, a) != _shape(graph, b):
            continue
        if not set(cost.read(a)) & set(cost.read(b)):
            continue
        both = graph.with_views(a | b)
        rest = [region for region in packed if region not in (a, b)]
        better = cost.saved(both) > cost.saved(a) + cost.saved(b)
        if better and not any(both & region for region in rest) and not waits_for_itself(graph, [both, *rest]):
            packed = [*rest, both]
    return packed


def _grown(graph: FusionGraph, cost: RegionCost, regions: Iterable[int]) -> list[int]:
    """``regions`` with neighbours that the beam lost sight of: what still saves something together is put together."""
    grown = list(regions)
    for region in list(grown):
        while region in grown:
            better = max(_joined(graph, cost, region, grown), key=lambda joined: joined[0], default=None)
            if better is None:
                break
            _, both = better
            grown = [other for other in grown if not other & both] + [both]
            region = both
    return grown


def _joined(graph: FusionGraph, cost: RegionCost, region: int, regions: list[int]) -> Iterator[tuple[float, int]]:
    """What is gained, and the region, where one more neighbour or its region comes in."""
    core = list(bits(region & graph.core))
    neighbours = {i for c in core for i in (*graph.producers(c), *graph.consumers(c))}
    for i in neighbours:
        if region >> i & 1 or not graph.core >> i & 1:
            continue
        other = next((mask for mask in regions if mask >> i & 1), 0)
        both = graph.with_views(region | other | 1 << i)
        gain = cost.saved(both) - cost.saved(region) - (cost.saved(other) if other else 0.0)
        rest = [mask for mask in regions if mask not in (region, other)]
        if gain > 0 and not any(both & mask for mask in rest) and not waits_for_itself(graph, [both, *rest]):
            yield gain, both


def _shape(graph: FusionGraph, region: int) -> tuple[tuple[str, Kind, str], ...]:
    core = bits(region & graph.core)
    return tuple((graph.ops[i].target, graph.kinds[i], str(graph.spaces[i].rows)) for i in core)


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
