"""A rank's share of the state of a run: whole tensors, or runs of elements of flattened ones."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

MASTER = "master"  # a parameter's weights: before its name
AVERAGE = "ema"  # of them
IN_USE = "in_use"  # the weights to validate and export, where an optimizer trains with others
ENTRIES = "optimizer_entries"  # what an optimizer remembers in its groups, as text: bytes


@dataclass(frozen=True)
class Part:
    """Elements ``[first, first + len(values))`` of a flattened tensor of ``size`` elements.

    ``values`` has one dimension and is the memory in use: loading copies into it. Of ranks with equal parts one
    ``writes`` it.
    """

    values: Tensor
    first: int
    size: int
    writes: bool = True


State: TypeAlias = Mapping[str, "Tensor | Part"]


def part_of(value: Tensor | Part) -> Part:
    """A whole tensor as a part. It must be contiguous, so that its part is its memory."""
    return value if isinstance(value, Part) else Part(value.detach().view(-1), 0, value.numel())


def written_by(state: State, rank: int, ranks: int) -> dict[str, Part]:
    """What ``rank`` writes: its parts, and its share of the tensors that all ranks hold whole.

    Those are dealt out, the largest first, each to the rank with the fewest bytes so far. All ranks come to the same.
    """
    loads = [(0, number) for number in range(ranks)]
    owned: dict[str, Part] = {}
    whole = {name: value for name, value in state.items() if isinstance(value, Tensor)}
    for name in sorted(whole, key=lambda name: (-whole[name].nbytes, name)):
        load, owner = heapq.heappop(loads)
        heapq.heappush(loads, (load + whole[name].nbytes, owner))
        if owner == rank:
            owned[name] = part_of(whole[name])
    return owned | {name: value for name, value in state.items() if isinstance(value, Part) and value.writes}
