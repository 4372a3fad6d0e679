"""Keys and values of a rank's heads, of which only the rows travel that its query groups chose.

In: what each rank wants of its heads, by key block, and a capacity of rows for each pair of ranks, which is known
before. Out: all tokens of a rank's heads, zeros in rows that nobody chose, and whether some wanted row had no room.
Sizes of messages follow from capacities alone, so no host waits for a device. Gradients go back in the same rows; a
head's gradients of several ranks are summed in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from arachnec.kernels.attention.collectives import accumulator, exchange
from arachnec.kernels.attention.divided_heads import Counts, Division, held_ranges
from arachnec.kernels.attention.host_tables import on_device
from arachnec.kernels.attention.sequence_shard import SequenceShard

Capacity = tuple[tuple[tuple[int, ...], ...], ...]  # rows, by owner, its share and the holder

NOTHING = (0, 0, 0)  # the shape of what a rank without heads is sent


@dataclass(frozen=True)
class Route:
    """Where a holder's tokens stand among the rows that are sent, [B, tokens]; ``rows`` for one that is not sent."""

    place: Tensor
    rows: int

    def packed(self, x: Tensor) -> Tensor:
        """[B, rows, D] of [B, tokens, D]; rows without a token are 0."""
        out = x.new_zeros(x.shape[0], self.rows + 1, x.shape[2])
        return out.scatter_(1, self.place[..., None].expand(x.shape), x)[:, :-1]

    def spread(self, rows: Tensor) -> Tensor:
        """The inverse, 0 for tokens that were not sent."""
        padded = torch.cat([rows, rows.new_zeros(rows.shape[0], 1, rows.shape[2])], 1)
        return padded.gather(1, self.place[..., None].expand(*self.place.shape, rows.shape[2]))


class ChosenKeys:
    """A ``HeadPlan`` of keys and values. Made by all ranks of the group together.

    ``wanted`` [B, shares here, blocks] bool: what this rank needs; ``block_of`` [S] the block of every token, on the
    host. Where a pair's capacity is all of the holder's tokens these travel as they are.
    """

    def __init__(
        self,
        division: Division,
        parts: Counts,
        shard: SequenceShard,
        wanted: Tensor,
        block_of: Tensor,
        capacity: Capacity,
    ) -> None:
        self.division, self.parts, self.capacity = division, parts, capacity
        self.me, self.ranks, self.group = shard.index, shard.ranks, shard.group
        peers = range(len(self.ranks))
        mine = wanted.to(torch.uint8)
        shapes = [[(wanted.shape[0], len(own), wanted.shape[2])] for own in division]
        arrived = exchange([[mine]] * len(division), shapes, self.ranks, self.group)
        self._blocks = [
            on_device(torch.cat([block_of[first:end] for first, end in held_ranges(parts, holder)]), wanted.device)
            for holder in peers
        ]
        self._routes: dict[tuple[int, int, int], Route | None] = {}
        short = [torch.zeros((), dtype=torch.bool, device=wanted.device)]
        for owner in peers:
            for place in range(len(division[owner])):
                for holder in peers if owner == self.me else (self.me,):
                    route, over = self._route(arrived[owner][0][:, place], owner, place, holder)
                    self._routes[owner, place, holder] = route
                    short += [] if over is None or owner != self.me else [over]
        self.overflowed = torch.stack(short).any()

    def _route(self, wanted: Tensor, owner: int, place: int, holder: int) -> tuple[Route | None, Tensor | None]:
        rows, held = self.capacity[owner][place][holder], self._held(holder)
        if rows >= held:
            return None, None
        needed = wanted[:, self._blocks[holder]].bool()
        at = needed.cumsum(1) - 1
        return Route(torch.where(needed & (at < rows), at, rows), rows), (needed.sum(1) > rows).any()

    def _held(self, holder: int) -> int:
        return sum(part[holder] for part in self.parts)

    def _rows(self, owner: int, place: int, holder: int) -> int:
        return min(self.capacity[owner][place][holder], self._held(holder))

    def to_heads(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        send = [
            [
                self._sent(x[:, share.head], owner, place, self.me)
                for x in tensors
                for place, share in enumerate(self.division[owner])
            ]
            or [tensors[0].new_empty(NOTHING)]
            for owner in range(len(self.ranks))
        ]
        own = self.division[self.me]
        shapes = [
            [(x.shape[0], self._rows(self.me, place, holder), x.shape[3]) for x in tensors for place in range(len(own))]
            or [NOTHING]
            for holder in range(len(self.ranks))
        ]
        received = [iter(pieces) for pieces in exchange(send, shapes, self.ranks, self.group)]
        results = []
        for x in tensors:
            out = x.new_empty(x.shape[0], len(own), sum(map(sum, self.parts)), x.shape[3])
            for holder, pieces in enumerate(received):
                for place in range(len(own)):
                    rows, route, local = next(pieces), self._routes[self.me, place, holder], 0
                    tokens = rows if route is None else route.spread(rows)
                    for first, end in held_ranges(self.parts, holder):
                        out[:, place, first:end] = tokens[:, local : local + end - first]
                        local += end - first
            results.append(out)
        return results

    def to_tokens(self, tensors: Sequence[Tensor], heads: Sequence[int]) -> list[Tensor]:
        own = self.division[self.me]
        send = [
            [
                self._sent(self._of_holder(x[:, place], holder), self.me, place, holder)
                for x in tensors
                for place in range(len(own))
            ]
            or [tensors[0].new_empty(NOTHING)]
            for holder in range(len(self.ranks))
        ]
        shapes = [
            [
                (x.shape[0], self._rows(owner, place, self.me), x.shape[3])
                for x in tensors
                for place in range(len(self.division[owner]))
            ]
            or [NOTHING]
            for owner in range(len(self.ranks))
        ]
        received = [iter(pieces) for pieces in exchange(send, shapes, self.ranks, self.group)]
        results = []
        for x, total in zip(tensors, heads, strict=True):
            held = self._held(self.me)
            out = x.new_zeros(x.shape[0], total, held, x.shape[3], dtype=accumulator(x.dtype))
            for owner, pieces in enumerate(received):
                for place, share in enumerate(self.division[owner]):
                    rows, route = next(pieces), self._routes[owner, place, self.me]
                    out[:, share.head] += rows if route is None else route.spread(rows)
            results.append(out.to(x.dtype))
        return results

    def _sent(self, x: Tensor, owner: int, place: int, holder: int) -> Tensor:
        route = self._routes[owner, place, holder]
        return x if route is None else route.packed(x)

    def _of_holder(self, x: Tensor, holder: int) -> Tensor:
        return torch.cat([x[:, first:end] for first, end in held_ranges(self.parts, holder)], 1)
