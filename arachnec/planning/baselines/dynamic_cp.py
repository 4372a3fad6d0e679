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
