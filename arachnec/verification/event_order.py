"""Events on which ranks meet, and a cycle in the order in which the ranks come to them."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import networkx as nx

# A position in a rank's list: the enclosing instruction's index, the event's number beside or inside it (receives are
# posted before it, an all-reduce may start inside a backward), and the event's own instruction index.
Place: TypeAlias = tuple[int, int, int]
Step: TypeAlias = tuple[int, int, int]
"""On a rank, one event before another: their numbers, then the rank."""


@dataclass(frozen=True)
class Event:
    """A point of synchronisation: its place in the list of every rank that takes part."""

    places: tuple[tuple[int, Place], ...]  # rank, place in its list

    def at(self, rank: int) -> Place:
        """Where the rank comes to it."""
        return next(place for member, place in self.places if member == rank)


def find_cycle(events: list[Event]) -> list[Step]:
    """A short cycle of events that wait for each other, one step per rank in it; empty where there is none."""
    edges = _edges(events)
    stuck = _unreachable(len(events), edges)
    if not stuck:
        return []
    graph: nx.DiGraph[int] = nx.DiGraph()
    for before, after, rank in edges:
        if before in stuck:  # and so is what waits for it
            graph.add_edge(before, after, rank=rank)
    start = nx.find_cycle(graph)[0][0]
    paths = (
        nx.shortest_path(graph, after, start) for after in graph.successors(start) if nx.has_path(graph, after, start)
    )
    cycle = [start, *min(paths, key=len)]
    return _merged([(a, b, graph.edges[a, b]["rank"]) for a, b in pairwise(cycle)])


def _edges(events: list[Event]) -> list[Step]:
    """``(before, after, rank)`` for every two events that follow each other in a rank's list."""
    lists: dict[int, list[tuple[Place, int]]] = defaultdict(list)
    for number, event in enumerate(events):
        for rank, place in event.places:
            lists[rank].append((place, number))
    return [(a, b, rank) for rank, items in lists.items() for (_, a), (_, b) in pairwise(sorted(items))]


def _unreachable(count: int, edges: list[Step]) -> set[int]:
    """The events that can never happen: what Kahn's algorithm leaves."""
    after: list[list[int]] = [[] for _ in range(count)]
    waiting = [0] * count
    for a, b, _ in edges:
        after[a].append(b)
        waiting[b] += 1
    ready = [number for number in range(count) if waiting[number] == 0]
    for number in ready:
        for b in after[number]:
            waiting[b] -= 1
            if waiting[b] == 0:
                ready.append(b)
    return set(range(count)) - set(ready)


def _merged(steps: list[Step]) -> list[Step]:
    """Consecutive steps of one rank as one step, also where the cycle closes."""
    merged: list[Step] = []
    for a, b, rank in steps:
        if merged and merged[-1][2] == rank:
            merged[-1] = (merged[-1][0], b, rank)
        else:
            merged.append((a, b, rank))
    first, *others = merged
    if others and others[-1][2] == first[2]:
        return [(others[-1][0], first[1], first[2]), *others[:-1]]
    return merged
