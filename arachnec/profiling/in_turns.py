"""Measurements in a budget of seconds: the most telling first, then all of them in turns.

Every rank takes part in every decision, so that all decide alike. In: jobs, and how one is run. Out: their times.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from arachnec.ir.long_computations import Reporter, unreported
from arachnec.profiling.points import Point
from arachnec.runtime.agreement import gather

SECONDS = 120.0  # of a profile
MOST_ROUNDS = 15
Times = TypeVar("Times")


@dataclass(frozen=True)
class Budget:
    """``seconds`` from now on."""

    seconds: float
    started: float = field(default_factory=time.monotonic)

    def left(self) -> float:
        """On the rank with the fewest; collective."""
        own = torch.tensor([self.started + self.seconds - time.monotonic()], dtype=torch.float64)
        return min(float(value) for value in gather(own))


@dataclass(frozen=True)
class Turn:
    """What is known of a job before it has run: its ``kind``, the point that it is of, and what it is, in words.

    A job without a point is of no size, and always measured. One that is ``extra`` comes after all others.
    """

    kind: tuple[object, ...]
    point: Point | None
    doing: str
    extra: bool = False


def in_turns(
    turns: Sequence[Turn],
    run: Callable[[int], Times],
    budget: Budget,
    reporter: Reporter = unreported,
    keep: Callable[[list[list[Times]]], None] = lambda times: None,
) -> list[list[Times]]:
    """The times of every job, in the order of ``turns``; none of a job for which there was no time.

    The shortest point is always measured, then the longest, then the one that is farthest from all measured so far;
    then the extra jobs in their order. A job that is not expected to fit into the budget is left out. Then rounds over
    all that were measured, as many as there is time for. A first time warms up: it counts where it is the only one.
    ``keep`` is given all times after every job once what is always measured is there.
    """
    times: list[list[Times]] = [[] for _ in turns]
    seconds: dict[int, float] = {}  # of a job's last run
    order, always = telling_order(turns)
    for number, index in enumerate(order):
        left = budget.left()
        if number >= always and expected_s(turns, index, seconds) > left:
            continue
        reporter(f"measuring {number + 1} of {len(order)}: {turns[index].doing}, {max(0.0, left):.0f} s left")
        for _ in range(2):
            seconds[index] = _longest(lambda index=index: times[index].append(run(index)))  # type: ignore[misc]
            if seconds[index] > budget.left():
                break
        if number + 1 >= always:
            keep(counted(times))
    done = [index for index in range(len(turns)) if times[index]]
    for number in range(2, MOST_ROUNDS):
        left = budget.left()
        if sum(seconds.values()) > left:
            break
        reporter(f"measuring all again, round {number} of up to {MOST_ROUNDS - 1}, {left:.0f} s left")
        for index in done:
            seconds[index] = _longest(lambda index=index: times[index].append(run(index)))  # type: ignore[misc]
        keep(counted(times))
    return counted(times)


def counted(times: Sequence[Sequence[Times]]) -> list[list[Times]]:
    """Without each job's first time, where it has others."""
    return [list(runs[1:] or runs) for runs in times]


def telling_order(turns: Sequence[Turn]) -> tuple[list[int], int]:
    """The jobs in the order in which they tell most, and how many of them are always run.

    Those of the shortest point, those without one, those of the longest point, and so on: each next point is the
    farthest from all before, by the logarithms of its tokens and its clips.
    """
    places = {_place(turn.point) for turn in turns if turn.point is not None and not turn.extra}
    ordered = sorted(places)
    chosen = ordered[:1]
    rest = sorted(set(ordered[1:]), key=lambda place: (place[1] == 0.0, place[0]))  # the longest single clip is last
    while rest:
        last = len(chosen) == 1
        following = rest[-1] if last else max(rest, key=lambda p: min(math.dist(p, other) for other in chosen))
        rest.remove(following)
        chosen.append(following)
    of_place = {
        place: [i for i, t in enumerate(turns) if t.point and not t.extra and _place(t.point) == place]
        for place in chosen
    }
    ends = [index for index, turn in enumerate(turns) if turn.point is None]
    first = [*of_place.get(chosen[0], []), *ends] if chosen else ends
    extra = [index for index, turn in enumerate(turns) if turn.extra]
    return [*first, *(index for place in chosen[1:] for index in of_place[place]), *extra], len(first)


def _place(point: Point) -> tuple[float, float]:
    return math.log(max(1, point.tokens)), math.log(len(point.clips))


def expected_s(turns: Sequence[Turn], index: int, seconds: dict[int, float]) -> float:
    """What a job will take, by the nearest of its kind: longer ones by the square of their size; 0 where none ran."""
    point = turns[index].point
    if point is None:
        return 0.0
    own = point.tokens * len(point.clips)
    sizes = {
        other: turn.point.tokens * len(turn.point.clips)
        for other, turn in enumerate(turns)
        if other in seconds and turn.kind == turns[index].kind and turn.point is not None
    }
    if not sizes:
        return 0.0
    nearest = min(sizes, key=lambda other: abs(math.log(own / sizes[other])))
    ratio = own / sizes[nearest]
    return seconds[nearest] * (ratio**2 if ratio > 1 else ratio)


def _longest(work: Callable[[], object]) -> float:
    """Seconds that this work takes on the rank that is last; collective."""
    started = time.perf_counter()
    work()
    took = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
    return max(float(value) for value in gather(took))
