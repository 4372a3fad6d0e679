"""Baselines that fill groups of GPUs greedily, and their schedules as candidates of the default.

`docs/baselines.md` says what differs from the originals.
"""

from __future__ import annotations

from collections.abc import Iterator

from arachnec.ir.nodes import Module
from arachnec.ir.stage_sizes import times_of
from arachnec.solver.group_rounds import Group, chain_ticks, in_rounds, least_loaded, power_sizes, sinks_of, ticks_at
from arachnec.solver.problem import Problem, Schedule
from arachnec.solver.static_layouts import at_least, best_one_degree, deal

PACE = 1.05  # of the heaviest sequence's work, up to which a group is filled


def in_dynamic_rounds(module: Module, problem: Problem, tokens: int | None = None) -> Schedule:
    """The cascades of a module in rounds, with at most ``tokens`` of a sequence per GPU.

    As Megatron-Core schedules it ("hybrid context parallel"): every sequence gets the smallest power of two of GPUs
    that holds it; its work is estimated as S^2 / cp. Then rounds are filled greedily: the heaviest sequence opens a
    group and sets the pace; others join the least loaded group of their size while that stays within the pace, or open
    a group while GPUs are free; the rest waits for the next round. GPUs that are left over double a group. All ranks
    meet between rounds, because groups change.
    """
    work: dict[int, float] = {}
    fewest: dict[int, float] = {}
    for sink in sinks_of(problem):
        cascade = module.cascades[sink]
        # a measured cascade has no tokens to speak of: its time on the fewest GPUs stands for S^2
        measured = times_of(cascade)
        work[sink] = min(measured.items())[1] if measured else float(cascade.batch * cascade.tokens**2)
        fewest[sink] = cascade.tokens / tokens if tokens and not measured else 1
    return in_rounds(problem, dynamic_rounds(problem, work, fewest))


def dynamic_rounds(problem: Problem, work: dict[int, float], fewest: dict[int, float]) -> list[list[Group]]:
    """Rounds of groups; ``work`` is S^2 of every chain, ``fewest`` the fewest GPUs that it should be on."""
    sizes = power_sizes(problem.gpus)
    needed = {
        sink: next(
            size
            for size in sizes
            if size == problem.gpus or (size >= fewest[sink] and chain_ticks(problem, sink, size) is not None)
        )
        for sink in work
    }
    pending = sorted(work, key=lambda sink: (-work[sink] / needed[sink], sink))
    rounds: list[list[Group]] = []
    while pending:
        groups, pending = _one_round(pending, work, needed, problem.gpus)
        rounds.append(groups)
    return rounds


def _one_round(
    pending: list[int], work: dict[int, float], needed: dict[int, int], gpus: int
) -> tuple[list[Group], list[int]]:
    free = gpus
    widths: list[int] = []
    loads: list[float] = []
    members: list[list[int]] = []
    waiting: list[int] = []
    pace = PACE * work[pending[0]] / needed[pending[0]]
    for sink in pending:
        cp = needed[sink]
        share = work[sink] / cp
        alike = [g for g in range(len(widths)) if widths[g] == cp and loads[g] + share <= pace]
        if free >= cp:
            free -= cp
            widths.append(cp)
            loads.append(share)
            members.append([sink])
        elif alike:
            g = min(alike, key=lambda g: loads[g])
            loads[g] += share
            members[g].append(sink)
        else:
            waiting.append(sink)
    while True:
        fitting = [g for g in range(len(widths)) if widths[g] <= free]
        if not fitting:
            break
        g = max(fitting, key=lambda g: (loads[g], -widths[g]))
        free -= widths[g]
        widths[g], loads[g] = 2 * widths[g], loads[g] / 2
    return [Group(*group) for group in zip(widths, map(tuple, members), strict=True)], waiting


def best_bags(problem: Problem, candidates: list[tuple[int, ...]]) -> Schedule | None:
    """The shortest schedule over these cuts of the GPUs; None where every one is too small for some job.

    As KnapFormer balances (arXiv 2508.06001): the GPUs are cut into bags; a sequence runs in one bag, shared by its
    GPUs. Longest first, every sequence goes to the bag that would be done with it first.
    """
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


def bucket_by_bucket(module: Module, problem: Problem, degree: int | None = None) -> Schedule:
    """The cascades of a module, those of one length at a time, at one degree or the best one.

    As NeMo trains video models: every data-parallel rank draws its micro-batch from the same bucket, so that all take
    equally long; then all go on to the next bucket. One context-parallel degree holds for the whole run. What is lost:
    GPUs for which a bucket has no micro-batch left wait, and a bucket of few long clips keeps few of them busy.
    """
    buckets: dict[object, list[int]] = {}
    for sink in sinks_of(problem):
        cascade = module.cascades[sink]
        buckets.setdefault((cascade.stage, cascade.tokens, cascade.attrs.get("times")), []).append(sink)
    degrees = [degree] if degree else sorted({c.degree for job in problem.jobs for c in job.choices})
    tried = [one_bucket_at_a_time(problem, list(buckets.values()), width) for width in degrees]
    return min(tried, key=lambda schedule: schedule.makespan(problem))


def one_bucket_at_a_time(problem: Problem, buckets: list[list[int]], degree: int) -> Schedule:
    """One round per bucket, its chains dealt to equal groups of at least ``degree`` GPUs."""
    rounds: list[list[Group]] = []
    for sinks in buckets:
        width = degree
        while any(chain_ticks(problem, sink, width) is None for sink in sinks):
            width += 1
        groups = least_loaded(ticks_at(problem, sinks, [width]), [width] * (problem.gpus // width))
        assert groups is not None
        rounds.append(groups)
    return in_rounds(problem, rounds)


def baseline_layouts(module: Module, problem: Problem) -> Iterator[Schedule]:
    """The layouts that others train with, those that take milliseconds."""
    yield best_one_degree(problem)
    yield deal(problem, at_least(problem, 1), in_turn=True)
    yield in_dynamic_rounds(module, problem)
    yield bucket_by_bucket(module, problem)
    bags = best_bags(problem, cuts(problem.gpus))
    if bags is not None:
        yield bags
