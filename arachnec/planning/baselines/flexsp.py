"""Heterogeneous sequence-parallel groups by integer programming, as FlexSP plans them (arXiv 2412.01523, section 4).

Sequences of like cost are counted in buckets. For every possible group p of d_p GPUs, d_p a power of two, m_p says
whether it exists, and x_qp how many sequences of bucket q it runs::

    minimise C    with  sum_q t_q(d_p) x_qp <= C     for every group: the slowest one decides
                        sum_p x_qp = b_q             every sequence runs once
                        x_qp <= b_q m_p              and in a group that exists
                        sum_p d_p m_p <= GPUs
                        x_qp = 0                     where d_p GPUs do not hold a sequence of bucket q

solved by HiGHS. The sequences may be cut by length into several micro-batches with groups of their own; each number of
micro-batches is tried. `docs/baselines.md` says what differs from the original.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from arachnec.solver.group_rounds import Group, Ticks, in_rounds, power_sizes, sinks_of, ticks_at
from arachnec.solver.problem import Problem, Schedule

DEFAULT_BUCKETS = 16

DEFAULT_MICRO_BATCHES = 2

RELATIVE_GAP = 1e-3  # at which HiGHS may stop


def solved(
    problem: Problem, seconds: float, buckets: int = DEFAULT_BUCKETS, micro_batches: int = DEFAULT_MICRO_BATCHES
) -> Iterator[Schedule]:
    """What HiGHS finds for each number of micro-batches, within ``seconds`` together."""
    ticks = ticks_at(problem, sinks_of(problem), power_sizes(problem.gpus))
    counts = range(1, min(micro_batches, len(ticks)) + 1)
    share = seconds / max(1, sum(counts))
    for count in counts:
        rounds = [solve_groups(buckets_of(part, buckets), problem.gpus, share) for part in cut_by_length(ticks, count)]
        if all(rounds):
            yield in_rounds(problem, rounds)


@dataclass(frozen=True)
class Bucket:
    """Chains that are planned as if they were equal: ``ticks`` by size of group are those of the slowest."""

    sinks: tuple[int, ...]
    ticks: dict[int, int | None]


def cut_by_length(ticks: Ticks, count: int) -> list[Ticks]:
    """The chains by length, cut into ``count`` runs of about equal work."""
    order = sorted(ticks, key=lambda sink: (-_work(ticks, sink), sink))
    total, assigned = sum(_work(ticks, sink) for sink in order), 0
    runs: list[list[int]] = [[] for _ in range(count)]
    for sink in order:
        runs[min(count - 1, assigned * count // max(1, total))].append(sink)
        assigned += _work(ticks, sink)
    return [{sink: ticks[sink] for sink in part} for part in runs if part]


def buckets_of(ticks: Ticks, limit: int) -> list[Bucket]:
    """At most ``limit`` buckets of neighbours by work, with the least total overestimate (dynamic programming)."""
    equal: dict[tuple[int | None, ...], list[int]] = {}
    for sink in sorted(ticks, key=lambda sink: (_work(ticks, sink), sink)):
        equal.setdefault(tuple(ticks[sink].values()), []).append(sink)
    kinds = list(equal.values())
    if len(kinds) <= limit:
        return [_bucket(sinks, ticks) for sinks in kinds]
    work = [_work(ticks, sinks[0]) for sinks in kinds]
    number = [len(sinks) for sinks in kinds]
    # overestimates[k][j]: of the first j kinds in k buckets, and where the last of those begins
    overestimates: list[list[tuple[int, int]]] = [[(0, 0)] + [(1 << 62, 0)] * len(kinds)]
    for _ in range(limit):
        row = [(0, 0)]
        for end in range(1, len(kinds) + 1):
            over, best = 0, (1 << 62, 0)
            for first in range(end - 1, -1, -1):
                over += number[first] * (work[end - 1] - work[first])
                best = min(best, (overestimates[-1][first][0] + over, first))
            row.append(best)
        overestimates.append(row)
    cuts, end = [len(kinds)], len(kinds)
    for row in reversed(overestimates[1:]):
        end = row[end][1]
        cuts.append(end)
    cuts.reverse()
    return [_bucket([sink for sinks in kinds[a:b] for sink in sinks], ticks) for a, b in pairwise(cuts) if a < b]


def _bucket(sinks: Sequence[int], ticks: Ticks) -> Bucket:
    worst: dict[int, int | None] = {}
    for size in ticks[sinks[0]]:
        values = [value for sink in sinks if (value := ticks[sink][size]) is not None]
        worst[size] = max(values) if len(values) == len(sinks) else None
    return Bucket(tuple(sinks), worst)


def _work(ticks: Ticks, sink: int) -> int:
    """Least GPU ticks of a chain."""
    return min(size * value for size, value in ticks[sink].items() if value is not None)


def solve_groups(buckets: Sequence[Bucket], gpus: int, seconds: float) -> list[Group]:
    """The groups and what each runs, longest first; empty where HiGHS found no answer in its time."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    count = sum(len(bucket.sinks) for bucket in buckets)
    sizes = [size for size in buckets[0].ticks for _ in range(min(count, gpus // size))]
    groups, kinds = len(sizes), len(buckets)
    variables = 1 + groups + groups * kinds  # C, then m, then x by group
    scale = max(value for bucket in buckets for value in bucket.ticks.values() if value is not None)
    rows: list[tuple[dict[int, float], float, float]] = []
    upper = np.concatenate([[np.inf], np.ones(groups), np.zeros(groups * kinds)])
    for g, size in enumerate(sizes):
        slowest: dict[int, float] = {0: -1.0}
        for q, bucket in enumerate(buckets):
            x, ticks = 1 + groups + g * kinds + q, bucket.ticks[size]
            if ticks is None:
                continue
            upper[x] = len(bucket.sinks)
            slowest[x] = ticks / scale
            rows.append(({x: 1.0, 1 + g: -float(len(bucket.sinks))}, -np.inf, 0.0))
        rows.append((slowest, -np.inf, 0.0))
        if g and sizes[g - 1] == size:
            rows.append(({1 + g: 1.0, g: -1.0}, -np.inf, 0.0))  # equal groups are used in order: no symmetric twins
    rows.append(({1 + g: float(size) for g, size in enumerate(sizes)}, 0.0, float(gpus)))
    for q, bucket in enumerate(buckets):
        number = float(len(bucket.sinks))
        rows.append(({1 + groups + g * kinds + q: 1.0 for g in range(groups)}, number, number))
    entries = [(row, column, value) for row, (terms, _, _) in enumerate(rows) for column, value in terms.items()]
    at_row, at_column, values = zip(*entries, strict=True)
    matrix = coo_array((values, (at_row, at_column)), shape=(len(rows), variables)).tocsr()
    result = milp(
        np.eye(1, variables).ravel(),
        integrality=np.concatenate([[0], np.ones(variables - 1)]),
        bounds=Bounds(np.zeros(variables), upper),
        constraints=LinearConstraint(matrix, np.array([low for _, low, _ in rows]), np.array([h for _, _, h in rows])),
        options={"time_limit": max(0.01, seconds), "mip_rel_gap": RELATIVE_GAP},
    )
    if result.x is None:
        return []
    numbers: list[list[int]] = np.rint(result.x[1 + groups :]).astype(int).reshape(groups, kinds).tolist()
    return list(_dealt(buckets, sizes, numbers))


def _dealt(buckets: Sequence[Bucket], sizes: Sequence[int], numbers: Sequence[Sequence[int]]) -> Iterator[Group]:
    """The groups that run anything; ``numbers`` say how many of each bucket."""
    remaining = [list(bucket.sinks) for bucket in buckets]
    for size, of_bucket in zip(sizes, numbers, strict=True):
        sinks = [remaining[q].pop() for q in reversed(range(len(buckets))) for _ in range(of_bucket[q])]
        if sinks:
            yield Group(size, tuple(sinks))
