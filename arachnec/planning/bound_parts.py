"""What the lower bound consists of, and what it would be without one of the things that raise it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Module
from arachnec.ir.values import Quantity, Value
from arachnec.planning.formulate import problem_of
from arachnec.planning.mixed_bound import bound_of
from arachnec.solver.bound import longest_chain, lower_bound
from arachnec.solver.problem import TICKS, Problem

PLENTY = 1e12  # GB/s or GiB
Cause = Literal["work", "chain", "wide"]


@dataclass(frozen=True)
class BoundParts:
    """The area bound of a module's cascades in ms, and its causes.

    ``cause`` is what no schedule that were any shorter could keep: all the ``work`` within the GPUs, the longest
    ``chain`` of cascades at their fastest, or that cascades which need more than half of the GPUs are one after
    another, ``wide``.
    """

    bound: float
    cause: Cause
    work: float  # each cascade at its least area, over all GPUs
    longest: float  # the longest chain, each at its fastest
    chain: tuple[str, ...]  # the cascades of that chain
    without_memory: float  # the bound, if memory limited nothing
    without_precedence: float  # if no cascade waited for another
    without_communication: float  # if links cost no time


def bound_parts(module: Module) -> BoundParts:
    """Of a module at level costed or later. Raises UserError where a cascade fits the memory at no degree."""
    cost = CostModel(module)
    problem = problem_of(module, cost)
    bound = bound_of(module, cost, problem)
    alone = Problem(tuple(replace(job, before=()) for job in problem.jobs), problem.gpus)
    work = sum(min(choice.area for choice in job.choices) for job in problem.jobs) / problem.gpus
    slower = bound > lower_bound(problem)  # some of the GPUs, which is what bounds it
    return BoundParts(
        bound=bound / TICKS,
        cause="work" if slower else _cause(problem, bound - 1),
        work=(bound if slower else work) / TICKS,
        longest=longest_chain(problem) / TICKS,
        chain=tuple(module.cascades[index].name for index in _chain(problem)),
        without_memory=_bound(_roomy(module)) / TICKS,
        without_precedence=bound_of(module, cost, alone) / TICKS,
        without_communication=_bound(_with_free_links(module)) / TICKS,
    )


def _bound(module: Module) -> int:
    cost = CostModel(module)
    return bound_of(module, cost, problem_of(module, cost))


def _roomy(module: Module) -> Module:
    """The module on devices on which every degree fits and nothing recomputes."""
    assert module.cluster is not None
    attrs = module.cluster.attrs
    sizes: dict[str, Value] = {"memory": Quantity(PLENTY, "GiB")}
    mixed = attrs.get("mixed")
    if isinstance(mixed, tuple):
        sizes["mixed"] = tuple(_with_plenty(row, "GiB") for row in mixed)
    return replace(module, cluster=replace(module.cluster, attrs=attrs.updated(**sizes)))


def _with_free_links(module: Module) -> Module:
    """The module on a cluster whose links, within nodes and between them, cost nothing."""
    assert module.cluster is not None
    attrs = module.cluster.attrs
    rates: dict[str, Value] = {
        name: Quantity(PLENTY, "GB/s") for name in ("intra", "inter", "uplink", "host_link") if name in attrs
    }
    delays = {name: Quantity(0.0, "us") for name in ("latency", "inter_latency")}
    mixed = attrs.get("mixed")
    if isinstance(mixed, tuple):
        rates["mixed"] = tuple(_with_plenty(row, "GB/s") for row in mixed)
    return replace(module, cluster=replace(module.cluster, attrs=attrs.updated(**rates, **delays)))


def _with_plenty(row: Value, unit: str) -> Value:
    """A kind of nodes, with as much as one likes of what is measured in this unit."""
    assert isinstance(row, tuple), "the table of the cluster's attributes says so"
    return tuple(
        Quantity(PLENTY, unit) if isinstance(value, Quantity) and value.unit == unit else value for value in row
    )


def _cause(problem: Problem, horizon: int) -> Cause:
    """What cannot be true of a schedule that ends at ``horizon``, which is below the bound."""
    wide = 0
    for job, head, tail in zip(problem.jobs, problem.heads, problem.tails, strict=True):
        allowed = [choice for choice in job.choices if head + choice.ticks + tail <= horizon]
        if not allowed:
            return "chain"
        wide += job.choices[-1].ticks if 2 * allowed[0].degree > problem.gpus else 0
    return "wide" if wide > horizon else "work"


def _chain(problem: Problem) -> list[int]:
    """The jobs of the longest chain, first to last; the first such chain of several."""
    if not problem.jobs:
        return []
    fastest = [job.choices[-1].ticks for job in problem.jobs]
    job = max(range(len(fastest)), key=lambda index: problem.heads[index] + fastest[index])
    path = [job]
    while problem.jobs[job].before:
        job = max(problem.jobs[job].before, key=lambda index: problem.heads[index] + fastest[index])
        path.append(job)
    return path[::-1]
