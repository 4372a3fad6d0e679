"""The process groups that plans should use: a fixed family of aligned groups, made once and kept from plan to plan.

A group is consecutive ranks from a multiple of its size on. Its subgroups of Ulysses and ring are few as well: those of
Ulysses are smaller groups of the family, those of the ring have one stride. In: a cluster, and the heads of its models'
attentions. Out: grids of Ulysses x ring, and the groups that cascades on them communicate in.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from functools import lru_cache

from arachnec.ir.nodes import Cascade, Cluster, Stage
from arachnec.kernels.attention.subgroups import subgroups

MOST_COMMUNICATORS = 16  # of a rank
ALWAYS = 2  # of them: that of all ranks, and that of the gradient all-reduces

Grid = tuple[int, int]  # Ulysses and ring degree
Ranks = tuple[int, ...]


@lru_cache(maxsize=64)
def family_grids(cluster: Cluster, heads: tuple[int, ...] = ()) -> tuple[Grid, ...]:
    """Grids whose cascades need no more than ``MOST_COMMUNICATORS`` on any rank, all together; the first matter most.

    Parts of a node come first, then nodes by doubling and those whose Ulysses is as wide as there are heads; each with
    the widest Ulysses that splits the heads evenly, up to two nodes with uneven heads, too; then what is left.
    """
    used: list[set[range]] = [set() for _ in range(cluster.world)]
    grids: dict[Grid, None] = {}
    for grid in _candidates(cluster, heads or (cluster.world,)):
        if all(len(used[rank] | groups) <= MOST_COMMUNICATORS - ALWAYS for rank, groups in _members(cluster, grid)):
            grids[grid] = None
            for rank, groups in _members(cluster, grid):
                used[rank] |= groups
    return tuple(grids)


@lru_cache(maxsize=64)
def family(cluster: Cluster, heads: tuple[int, ...] = ()) -> tuple[Ranks, ...]:
    """Every group of more than one rank that cascades on the family's grids communicate in, subgroups included."""
    groups = (
        tuple(sorted(group))
        for ulysses, ring in family_grids(cluster, heads)
        for ranks in aligned(cluster, ulysses * ring)
        for group in subgroups(ranks, ulysses, ring)
    )
    return tuple(dict.fromkeys(groups))


def aligned(cluster: Cluster, size: int) -> tuple[Ranks, ...]:
    """Consecutive ranks from each multiple of ``size`` on; of less than a node those that lie in one."""
    return tuple(tuple(range(first, first + size)) for first in _firsts(cluster, size))


def _firsts(cluster: Cluster, size: int) -> list[int]:
    firsts = range(0, cluster.world - size + 1, size)
    return [
        first for first in firsts if size >= cluster.gpus or first // cluster.gpus == (first + size - 1) // cluster.gpus
    ]


def heads_of(stages: tuple[Stage, ...]) -> tuple[int, ...]:
    """The numbers of heads of trained stages that have attentions."""
    heads = (stage.attrs.get("heads") for stage in stages if stage.trained)
    return tuple(sorted({count for count in heads if isinstance(count, int) and count > 1}))


def in_family(cascade: Cascade, grids: Collection[Grid]) -> bool:
    """Whether a placed cascade communicates in groups of the family with these grids alone."""
    if cascade.degree == 1:
        return True
    ranks = cascade.ranks
    first = ranks[0]
    if first % len(ranks) or ranks != tuple(range(first, first + len(ranks))):
        return False
    if "ulysses" not in cascade.attrs:
        return any(ulysses * ring == len(ranks) for ulysses, ring in grids)
    return (cascade.attrs["ulysses"], cascade.attrs.get("ring", 1)) in grids


def _candidates(cluster: Cluster, heads: tuple[int, ...]) -> Iterator[Grid]:
    def widest(size: int) -> int:
        return max(math.gcd(size, count) for count in heads)

    most = max(heads)
    others = [*range(2 * cluster.gpus, cluster.world, cluster.gpus), *range(3, cluster.gpus)]
    split_as_heads = {size for size in others if size > cluster.gpus and widest(size) == min(size, most)}
    for size in sorted({*_sizes(cluster), *split_as_heads}):
        yield _grid(size, widest(size))
        if size <= 2 * cluster.gpus:
            yield _grid(size, max(u for u in _divisors(size) if u <= min(most, cluster.gpus)))
    yield from (_grid(size, widest(size)) for size in others)


def _sizes(cluster: Cluster) -> Iterator[int]:
    """Parts of a node, then nodes by doubling, then all."""
    yield from (size for size in _divisors(cluster.gpus) if size > 1)
    size = 2 * cluster.gpus
    while size <= cluster.world:
        yield size
        size *= 2
    if cluster.world > 1:
        yield cluster.world


def _grid(size: int, ulysses: int) -> Grid:
    return ulysses, size // ulysses


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _members(cluster: Cluster, grid: Grid) -> Iterator[tuple[int, set[range]]]:
    """Each rank that runs a cascade on this grid, and its groups there: ``subgroups`` of which it is one."""
    ulysses, ring = grid
    size = ulysses * ring
    for first in _firsts(cluster, size):
        for place in range(size):
            row, column = first + place // ulysses * ulysses, first + place % ulysses
            groups = {
                range(first, first + size),
                range(row, row + ulysses),
                range(column, column + (ring - 1) * ulysses + 1, ulysses),
            }
            yield first + place, {group for group in groups if len(group) > 1}
