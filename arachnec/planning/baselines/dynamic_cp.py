"""Dynamic context parallelism as Megatron-Core schedules it ("hybrid context parallel").

Every sequence gets the smallest power of two of GPUs that holds it; its work is estimated as S^2 / cp. Then rounds are
filled greedily: the heaviest sequence opens a group and sets the pace; others join the least loaded group of their size
while that stays within the pace, or open a group while GPUs are free; the rest waits for the next round. GPUs that are
left over double a group. All ranks meet between rounds, because groups change. `docs/baselines.md` says what differs.
"""

from __future__ import annotations

from arachnec.ir.nodes import Module
from arachnec.ir.stage_sizes import times_of
from arachnec.solver.group_rounds import Group, chain_ticks, in_rounds, power_sizes, sinks_of
from arachnec.solver.problem import Problem, Schedule

PACE = 1.05  # of the heaviest sequence's work, up to which a group is filled


def in_dynamic_rounds(module: Module, problem: Problem, tokens: int | None = None) -> Schedule:
    """The cascades of a module in rounds, with at most ``tokens`` of a sequence per GPU."""
    work: dict[int, float] = {}
    wanted: dict[int, float] = {}
    for sink in sinks_of(problem):
        cascade = module.cascades[sink]
        # a measured cascade has no tokens to speak of: its time on the fewest GPUs stands for S^2
        measured = times_of(cascade)
        work[sink] = min(measured.items())[1] if measured else float(cascade.batch * cascade.tokens**2)
        wanted[sink] = cascade.tokens / tokens if tokens and not measured else 1
    return in_rounds(problem, dynamic_rounds(problem, work, wanted))


def dynamic_rounds(problem: Problem, work: dict[int, float], wanted: dict[int, float]) -> list[list[Group]]:
    """Rounds of groups; ``work`` is S^2 of every chain, ``wanted`` the fewest GPUs that it should be on."""
    sizes = power_sizes(problem.gpus)
    needed = {
        sink: next(
            size
            for size in sizes
            if size == problem.gpus or (size >= wanted[sink] and chain_ticks(problem, sink, size) is not None)
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
    size: list[int] = []
    load: list[float] = []
    given: list[list[int]] = []
    waiting: list[int] = []
    pace = PACE * work[pending[0]] / needed[pending[0]]
    for sink in pending:
        cp = needed[sink]
        share = work[sink] / cp
        alike = [g for g in range(len(size)) if size[g] == cp and load[g] + share <= pace]
        if free >= cp:
            free -= cp
            size.append(cp)
            load.append(share)
            given.append([sink])
        elif alike:
            g = min(alike, key=lambda g: load[g])
            load[g] += share
            given[g].append(sink)
        else:
            waiting.append(sink)
    while True:
        fitting = [g for g in range(len(size)) if size[g] <= free]
        if not fitting:
            break
        g = max(fitting, key=lambda g: (load[g], -size[g]))
        free -= size[g]
        size[g], load[g] = 2 * size[g], load[g] / 2
    return [Group(*group) for group in zip(size, map(tuple, given), strict=True)], waiting
