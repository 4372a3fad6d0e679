"""Which devices a stage gets: DAPPLE's three policies (2007.01045, section 5.2.2)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby, product

from arachnec.pipelining.hybrid_plan import Allocation

POLICIES = ("fresh-first", "append-first", "scatter-first")


def allocate(policy: str, used: Allocation, devices: int, count: int) -> Allocation:
    """``count`` devices of machines of ``devices`` each, of which ``used`` are taken. ValueError if they are too few.

    Fresh first takes machines that nothing is on, so that a stage stays in one. Append first fills those that have
    begun. Scatter first takes from all that have begun in turn, or from all machines where none has.
    """
    begun = [k for k, taken in enumerate(used) if taken]  # a full one gives none
    fresh = [k for k, taken in enumerate(used) if not taken]
    groups = {"fresh-first": (fresh, begun), "append-first": (begun, fresh), "scatter-first": (begun, fresh)}
    taken = [0] * len(used)
    left = count
    for group in groups[policy]:
        turns = _in_turn if policy == "scatter-first" else _one_by_one
        for machine in turns(group, [devices - used[k] for k in group]):
            if left:
                taken[machine] += 1
                left -= 1
    if left:
        raise ValueError("too few devices")
    return tuple(taken)


@lru_cache(maxsize=1 << 16)
def allocations(used: Allocation, devices: int, count: int) -> tuple[Allocation, ...]:
    """What the policies say, each once."""
    return tuple(dict.fromkeys(allocate(policy, used, devices, count) for policy in POLICIES))


@lru_cache(maxsize=1 << 16)
def every_allocation(used: Allocation, before: Allocation, devices: int, count: int) -> tuple[Allocation, ...]:
    """Every way to take ``count`` devices, behind a stage on ``before``.

    Of machines that are equally full and have equally much of the stage before, the first ones give most: which of
    them does makes no difference to any time.
    """
    alike = sorted(range(len(used)), key=lambda k: (used[k], before[k]))
    groups = [list(group) for _, group in groupby(alike, key=lambda k: (used[k], before[k]))]

    def falling(group: list[int]) -> Iterator[tuple[tuple[int, int], ...]]:
        for taken in product(range(devices - used[group[0]] + 1), repeat=len(group)):
            if sum(taken) <= count and list(taken) == sorted(taken, reverse=True):
                yield tuple(zip(group, taken, strict=True))

    ways = []
    for parts in product(*map(falling, groups)):
        taken = dict(pair for part in parts for pair in part)
        if sum(taken.values()) == count:
            ways.append(tuple(taken[k] for k in range(len(used))))
    return tuple(ways)


def _one_by_one(machines: list[int], free: list[int]) -> Iterator[int]:
    """Every free device's machine, the first machine's first."""
    for machine, count in zip(machines, free, strict=True):
        yield from [machine] * count


def _in_turn(machines: list[int], free: list[int]) -> Iterator[int]:
    """Every free device's machine, one of each in turn."""
    turns = sorted((turn, place) for place, count in enumerate(free) for turn in range(count))
    return (machines[place] for _, place in turns)
