"""Bags of GPUs of fixed sizes, filled greedily to equal load, as KnapFormer balances (arXiv 2508.06001).

The GPUs are cut into bags; a sequence runs in one bag, shared by its GPUs. Longest first, every sequence goes to the
bag that would be done with it first. `docs/baselines.md` says what differs from the original.
"""

from __future__ import annotations

from collections.abc import Iterator

from arachnec.solver.group_rounds import in_rounds, least_loaded, power_sizes, sinks_of, ticks_at
from arachnec.solver.problem import Problem, Schedule


def best_bags(problem: Problem, candidates: list[tuple[int, ...]]) -> Schedule | None:
    """The shortest schedule over these cuts of the GPUs; None where every one is too small for some job."""
    ticks = ticks_at(problem, sinks_of(problem), {size for sizes in candidates for size in sizes})
    assignments = [least_loaded(ticks, sizes) for sizes in candidates]
    tried = [in_rounds(problem, [groups]) for groups in assignments if groups is not None]
    return min(tried, key=lambda schedule: schedule.makespan(problem), default=None)


def cuts(gpus: int) -> list[tuple[int, ...]]:
    """Equal bags of every power of two, and one, a quarter, half and three quarters of the GPUs in larger bags."""
    return list(dict.fromkeys(_cuts(gpus)))


def _cuts(gpus: int) -> Iterator[tuple[int, ...]]:
    sizes = power_sizes(gpus)
    for large in sizes:
        yield (large,) * (gpus // large)
        for small in sizes:
            if small >= large:
                break
            for count in sorted({1, *(gpus * part // (4 * large) for part in (1, 2, 3))} - {0}):
                remaining = gpus - count * large
                if remaining >= small:
                    yield (large,) * count + (small,) * (remaining // small)
