"""Schedules of groups of GPUs that each run their micro-batches one after another, round after round.

What FlexSP, KnapFormer, Megatron's dynamic context parallelism and NeMo's buckets have in common: within a round the
GPUs are cut into groups, a group runs what it is given, and the next round begins when every group is done. They differ
in how groups and rounds are found.

An encoder runs on the GPUs of the group that needs its output, right before.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from arachnec.solver.problem import Problem, Schedule
from arachnec.solver.static_layouts import chain_of

Ticks: TypeAlias = Mapping[int, Mapping[int, int | None]]  # of every chain, by the size of a group


@dataclass(frozen=True)
class Group:
    """``degree`` GPUs, and the last job of every chain that they run, in this order."""

    degree: int
    sinks: tuple[int, ...] = ()


def sinks_of(problem: Problem) -> list[int]:
    """The jobs that nothing waits for: each stands for its chain."""
    return [index for index in range(len(problem.jobs)) if not problem.after[index]]


def pick_within(problem: Problem, job: int, degree: int) -> int | None:
    """The fastest choice of a job on at most ``degree`` GPUs; None where those do not hold it."""
    choices = problem.jobs[job].choices
    held = [k for k, choice in enumerate(choices) if choice.degree <= degree]
    return held[-1] if held else None


def chain_ticks(problem: Problem, sink: int, degree: int) -> int | None:
    """Ticks of a whole chain in a group of ``degree`` GPUs; None where those do not hold it."""
    total = 0
    for job in chain_of(problem, sink):
        pick = pick_within(problem, job, degree)
        if pick is None:
            return None
        total += problem.jobs[job].choices[pick].ticks
    return total


def power_sizes(gpus: int) -> list[int]:
    """Powers of two up to ``gpus``, and ``gpus`` itself, ascending."""
    sizes = [1 << exponent for exponent in range(gpus.bit_length())]
    return sizes if sizes[-1] == gpus else [*sizes, gpus]


def in_rounds(problem: Problem, rounds: Sequence[Sequence[Group]]) -> Schedule:
    """Every chain in its group, every round after the one before.

    Raises ValueError where a chain is in no group, or the group does not hold it.
    """
    picks = [-1] * len(problem.jobs)
    starts = [0] * len(problem.jobs)
    ends = [0] * len(problem.jobs)
    begin = 0
    for groups in rounds:
        last = begin
        for group in groups:
            free = begin
            for sink in group.sinks:
                for job in chain_of(problem, sink):
                    if picks[job] >= 0:
                        continue  # an encoder that another chain had run
                    pick = pick_within(problem, job, group.degree)
                    if pick is None:
                        raise ValueError(f"{group.degree} GPUs do not hold job {job}")
                    ready = max((ends[earlier] for earlier in problem.jobs[job].before), default=0)
                    picks[job], starts[job] = pick, max(free, ready)
                    ends[job] = free = starts[job] + problem.jobs[job].choices[pick].ticks
            last = max(last, free)
        begin = last
    if -1 in picks:
        raise ValueError(f"job {picks.index(-1)} is in no group")
    return Schedule(tuple(picks), tuple(starts))


def ticks_at(problem: Problem, sinks: Sequence[int], sizes: Iterable[int]) -> Ticks:
    """Of every chain its ticks in a group of every size."""
    distinct = sorted(set(sizes))
    return {sink: {size: chain_ticks(problem, sink, size) for size in distinct} for sink in sinks}


def least_loaded(ticks: Ticks, sizes: Sequence[int]) -> list[Group] | None:
    """The longest chains first, each to the group that would be done with it first; None where no group holds one."""
    waiting: dict[int, list[tuple[int, int]]] = {size: [] for size in set(sizes)}  # of each size: load, group
    for number, size in enumerate(sizes):
        waiting[size].append((0, number))
    given: list[list[int]] = [[] for _ in sizes]
    for sink in sorted(ticks, key=lambda sink: (-max(ticks[sink][size] or 0 for size in waiting), sink)):
        needed = ticks[sink]
        ends = [(groups[0][0] + t, size) for size, groups in waiting.items() if (t := needed[size]) is not None]
        if not ends:
            return None
        end, size = min(ends)
        _, number = waiting[size][0]
        heapq.heapreplace(waiting[size], (end, number))
        given[number].append(sink)
    return [Group(size, tuple(sinks)) for size, sinks in zip(sizes, given, strict=True)]
