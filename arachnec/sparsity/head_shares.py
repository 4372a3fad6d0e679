"""Heads of unequal density over the ranks of a clip: who computes what, which keys travel, and when layers learn.

Whole heads first, longest first; what fits on no rank below the mean is cut between query groups. At most ranks - 1
places are cut, and a head's keys and values go to one more rank at each. Inside a machine all keys travel. Between
machines those that the groups chose, as far as there is room for them, and in the steps in which the layer learns all,
since what is measured there needs them. Layers take turns in learning, so that steps take equally long.

A plan counts for each rank all blocks in the lists of as many heads as it has where heads go by number. A rank with
many light heads, as they were assumed, may have more when they turn out heavy. It then computes more than a rank of a
dense layer does, so that this division is worth nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from arachnec.ir.head_density import HeadPart


@dataclass(frozen=True, order=True)
class Share:
    """Query groups ``start`` to ``stop`` - 1 of a head."""

    head: int
    start: int
    stop: int

    @property
    def groups(self) -> int:
        return self.stop - self.start


Division: TypeAlias = tuple[tuple[Share, ...], ...]
"""For every rank of a clip its shares, by head."""
HALVINGS = 12  # of what a rank may be above the mean
EVEN = 1.005  # the heaviest rank over the mean, up to which moving keys and values for less is not worth it


def balanced(weights: Sequence[float], groups: int, ranks: int) -> Division:
    """Every group of every head on one rank, the heaviest rank as light as whole heads and at most ranks - 1 cuts
    make it; never heavier than ``longest_first``.

    ``weights`` are the work of each head, which its ``groups`` query groups share equally. Raises ValueError for a
    weight that is not positive and finite, and for less than one group or rank.
    """
    _require(weights, groups, ranks)
    whole = longest_first(weights, groups, ranks)
    if imbalance(whole, weights, groups) <= EVEN:
        return whole
    divided = _whole_then_cut(weights, groups, ranks)
    return divided if imbalance(divided, weights, groups) < imbalance(whole, weights, groups) else whole


def longest_first(weights: Sequence[float], groups: int, ranks: int) -> Division:
    """Whole heads, the heaviest first, each to the rank that has least so far (LPT; DSV, arXiv 2502.07590, section 4).

    Raises ValueError as ``balanced``.
    """
    _require(weights, groups, ranks)
    loads = [0.0] * ranks
    shares: list[list[Share]] = [[] for _ in range(ranks)]
    for head in _heaviest_first(weights):
        rank = loads.index(min(loads))
        loads[rank] += weights[head]
        shares[rank].append(Share(head, 0, groups))
    return _sorted(shares)


def by_number(heads: int, groups: int, ranks: int) -> Division:
    """Whole heads in runs of as equal length as possible, the longer ones first, as Ulysses deals them."""
    bounds = [math.ceil(rank * heads / ranks) for rank in range(ranks + 1)]
    return tuple(tuple(Share(head, 0, groups) for head in range(start, stop)) for start, stop in pairwise(bounds))


def loads(division: Division, weights: Sequence[float], groups: int) -> tuple[float, ...]:
    """The work of every rank."""
    return tuple(math.fsum(weights[share.head] * share.groups / groups for share in shares) for shares in division)


def imbalance(division: Division, weights: Sequence[float], groups: int) -> float:
    """The heaviest rank's work over the mean."""
    return max(loads(division, weights, groups)) * len(division) / math.fsum(weights)


def copies(division: Division) -> int:
    """How often a head's keys and values go to one more rank than the first."""
    return sum(len(shares) for shares in division) - len({share.head for shares in division for share in shares})


def _require(weights: Sequence[float], groups: int, ranks: int) -> None:
    if not weights or not all(weight > 0 and math.isfinite(weight) for weight in weights):
        raise ValueError("the work of a head must be positive and finite")
    if groups < 1 or ranks < 1:
        raise ValueError(f"{groups} query groups cannot be divided over {ranks} ranks")


def _heaviest_first(weights: Sequence[float]) -> list[int]:
    return sorted(range(len(weights)), key=lambda head: (-weights[head], head))


def _whole_then_cut(weights: Sequence[float], groups: int, ranks: int) -> Division:
    mean = math.fsum(weights) / ranks
    free = [mean] * ranks
    shares: list[list[Share]] = [[] for _ in range(ranks)]
    left = []
    for head in _heaviest_first(weights):
        rank = free.index(max(free))
        if weights[head] > free[rank] * (1 + 1e-9):
            left.append(head)
            continue
        free[rank] -= weights[head]
        shares[rank].append(Share(head, 0, groups))
    return _sorted([[*own, *more] for own, more in zip(shares, _filled(left, weights, groups, free), strict=True)])


def _filled(heads: Sequence[int], weights: Sequence[float], groups: int, free: Sequence[float]) -> list[list[Share]]:
    """Shares of these heads for what is ``free`` on the ranks, none of them above it by more than need be."""
    low, high = 0.0, max((weights[head] / groups for head in heads), default=0.0)
    filled = _fill(heads, weights, groups, [space + high for space in free])
    assert filled is not None, "a rank leaves less than a group of its space"
    for _ in range(HALVINGS):
        over = (low + high) / 2
        attempt = _fill(heads, weights, groups, [space + over for space in free])
        if attempt is None:
            low = over
        else:
            high, filled = over, attempt
    return filled


def _fill(
    heads: Sequence[int], weights: Sequence[float], groups: int, free: Sequence[float]
) -> list[list[Share]] | None:
    """One rank after the other filled with whole groups, cutting the head that does not fit (McNaughton, Management
    Science 6, 1959); None where they do not fit."""
    order = iter(sorted(range(len(free)), key=lambda rank: (-free[rank], rank)))
    shares: list[list[Share]] = [[] for _ in free]
    place = next(order)
    space = free[place]
    for head in heads:
        group = weights[head] / groups
        start = 0
        while start < groups:
            stop = min(groups, start + max(0, math.floor(space / group + 1e-9)))
            if stop > start:
                shares[place].append(Share(head, start, stop))
                space -= (stop - start) * group
                start = stop
            if start < groups:
                after = next(order, None)
                if after is None:
                    return None
                place, space = after, free[after]
    return shares


def _sorted(shares: Sequence[Sequence[Share]]) -> Division:
    return tuple(tuple(sorted(of_rank)) for of_rank in shares)


FIRST = 256  # steps, in each of which a layer that is dense learns
SPARSE_EVERY = 8  # steps, of a layer that is sparse
DENSE_EVERY = 16  # steps behind the first, of one that is dense: what it gains is not known, so it may cost little


def learns(layer: int, step: int, sparse: bool, sparse_every: int = SPARSE_EVERY) -> bool:
    """Whether a layer, by its number in the model, learns in a step. A benchmark asks for other ``sparse_every``."""
    if not sparse and step < FIRST:
        return True
    return (step + layer) % (sparse_every if sparse else DENSE_EVERY) == 0


MARGIN = 1.5  # of room over what groups took when it was last measured


def independent(density: float, groups: int) -> float:
    """The share of key blocks that some of so many groups take, if each chooses by itself. Neighbours choose alike, so
    it is at most this."""
    return 1 - (1 - density) ** groups if density < 1 else 1.0


def keys_sent(density: float, groups: int, inside: float = 1.0) -> float:
    """The share of a head's keys that a rank gets for so many groups, mean over steps. ``inside`` is the share of the
    other ranks that are on its own machine."""
    chosen = min(1.0, MARGIN * independent(density, groups))
    between = 1 / SPARSE_EVERY + (1 - 1 / SPARSE_EVERY) * chosen
    return inside + (1 - inside) * between


def share_inside(degree: int, node: int) -> float:
    """Of the other ranks of a clip, those on one's own machine of ``node`` ranks; all of one rank's."""
    return 1.0 if degree <= max(1, node) else (node - 1) / (degree - 1)


def heads_by_number(heads: int, ranks: int) -> int:
    """On the rank that has most."""
    return -(-heads // ranks)


def lists_fit(
    parts: Sequence[HeadPart], kept: Sequence[int], ranks: int, groups: int, blocks: int, captions: int
) -> bool:
    """Whether the lists of no rank are longer than was planned, where each head keeps so many of the ``blocks`` of
    video and all of ``captions``."""
    held = [0.0] * ranks
    for part in parts:
        held[part.place] += (part.stop - part.start) / groups * (kept[part.head] + captions) + 1
    return math.ceil(max(held)) <= heads_by_number(len(kept), ranks) * (blocks + captions + 1)
