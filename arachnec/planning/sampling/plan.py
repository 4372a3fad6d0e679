"""A costed module of requests to a schedule on ranks: degrees, borders of segments, order, residency, and a bound.

Ways are tried in the order of what they take, milliseconds first, and each is judged as placed on ranks:

1. Every rank holds all stages, where the memory allows it: wrap-around over aligned blocks (``solver.malleable``), one
   degree for all, and the portfolio of ``solver.search`` over whole segments, which proves small instances.
2. Two pools, one for each model: every share and degree by enumeration. Where the memory does not hold both models this
   is all there is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import Diagnostic, UserError, counted
from arachnec.ir.nodes import Cascade, Level, Module, Phase
from arachnec.ir.sampling import arrival_of, models_of, planned_steps
from arachnec.ir.values import Quantity
from arachnec.planning.formulate import describe
from arachnec.planning.placement import end_of, quick_placements
from arachnec.planning.sampling.chains import Rates, RequestChain, request_chains, scheduled, with_pieces
from arachnec.planning.sampling.placed_segments import placed_segments
from arachnec.planning.sampling.policies import (
    in_order_of_length,
    one_degree,
    replica,
    shared_pools,
    wrap_arounds,
)
from arachnec.solver.budget import Clock
from arachnec.solver.malleable import Chain, Piece, least_makespan, length
from arachnec.solver.problem import TICKS, Choice, Job, Problem
from arachnec.solver.search import solve

CLOSE = 1e-3  # of the bound, from which on nothing else is tried
Policy = Literal["search", "replica", "one-degree", "two-pools"]
Objective = Literal["makespan", "mean-latency", "p95-latency"]


@dataclass(frozen=True)
class FitsNoRank(Diagnostic):
    title: ClassVar[str] = "{what} fits no rank: it needs {needed:.1f} GiB, its model included, there are {room:.1f}"
    label: ClassVar[str] = "too large for this cluster"
    help: ClassVar[str] = "{remedy}"
    what: str
    needed: float
    room: float
    remedy: str


@dataclass(frozen=True)
class NotThisWay(Diagnostic):
    title: ClassVar[str] = "`{policy}` cannot run these requests on {gpus}: {reason}"
    help: ClassVar[str] = "leave `policy` out, or use devices with more memory"
    policy: str
    gpus: str
    reason: str


def planned(
    module: Module, clock: Clock, *, policy: Policy = "search", objective: Objective = "makespan", seed: int = 0
) -> Module:
    """The module at level ``scheduled``, each cascade with the ranks that the plan chose as ``assigned``.

    Raises UserError where a request fits no rank.
    """
    cost = CostModel(module)
    alone = request_chains(module, Rates(cost, down=True))
    if isinstance(alone, Cascade):
        raise UserError(fits_no_rank(alone, cost))
    bound = least_makespan([request.chain for request in alone], cost.cluster.world)
    plans = list(_plans(module, cost, alone, bound, policy))
    best = min(plans, key=lambda plan: plan.value(objective), default=None)
    placed = None if best is None else placed_segments(module, best.cascades(module), cost)
    if policy == "search" and objective == "makespan" and not is_close(placed, bound):
        placed = _improved(module, cost, alone, placed, clock, seed)
    if placed is None:
        reason = "some request fits no group of ranks"
        raise UserError(NotThisWay(None, policy, counted(cost.cluster.world, "GPU"), reason))
    makespan = end_of(placed)
    return replace(
        module,
        level=Level.SCHEDULED,
        cascades=tuple(c.with_attrs(assigned=c.ranks, ranks=None, ulysses=None, ring=None) for c in placed),
        attrs=module.attrs.updated(
            makespan=Quantity(makespan, "ms"),
            bound=Quantity(bound / TICKS, "ms"),
            area_bound=Quantity(bound / TICKS, "ms"),
            proved=makespan <= bound / TICKS * (1 + 1e-9),
        ),
    )


def is_close(placed: Sequence[Cascade] | None, bound: int) -> bool:
    """Whether a plan's makespan is so close to the bound that nothing else is worth its time."""
    return placed is not None and end_of(placed) * TICKS <= bound * (1 + CLOSE)


def latencies_of(module: Module, placed: Sequence[Cascade]) -> dict[int, float]:
    """ms from each request's arrival to the end of its last cascade."""
    ends: dict[int, float] = {}
    for cascade in placed:
        for clip in cascade.clips:
            ends[clip] = max(ends.get(clip, 0.0), cascade.end)
    return {clip.id: ends[clip.id] - arrival_of(clip) for clip in module.clips}


def percentile(values: Sequence[float], part: float) -> float:
    """The least value that so large a part of them does not exceed."""
    return sorted(values)[math.ceil(part * len(values)) - 1]


@dataclass(frozen=True)
class Plan:
    """Pieces of chains on ranks, not yet cascades."""

    requests: list[RequestChain]
    pieces: list[Piece]
    rates: Rates

    def value(self, objective: Objective) -> float:
        """Ticks: the makespan, or a statistic of the requests' latencies."""
        if objective == "makespan":
            return length(self.pieces)
        ends: dict[int, int] = {}
        for piece in self.pieces:
            ends[piece.chain] = max(ends.get(piece.chain, 0), piece.end)
        latencies = [
            float(ends[number] - request.chain.release)
            for number, request in enumerate(self.requests)
            for _ in request.requests
        ]
        return math.fsum(latencies) / len(latencies) if objective == "mean-latency" else percentile(latencies, 0.95)

    def cascades(self, module: Module) -> list[Cascade]:
        return with_pieces(module, self.requests, self.pieces, self.rates)


def _plans(module: Module, cost: CostModel, alone: list[RequestChain], bound: int, policy: Policy) -> Iterator[Plan]:
    """What policies make of the chains, one way after another."""
    gpus, node = cost.cluster.world, cost.cluster.gpus
    if policy != "two-pools":
        together = _everywhere(cost, alone)
        requests = request_chains(module, together)
        if not isinstance(requests, Cascade):
            for pieces in _together([request.chain for request in requests], gpus, node, bound, policy):
                plan = Plan(requests, pieces, together)
                yield plan
                if policy == "search" and length(plan.pieces) <= bound * (1 + CLOSE):
                    return
    if policy in ("search", "two-pools"):
        yield from _pools(module, cost, gpus, node)


def _everywhere(cost: CostModel, requests: Sequence[RequestChain]) -> Rates:
    """Rates where every rank holds all stages."""
    return Rates(cost, {cascade.stage for request in requests for cascade in request.cascades})


def _together(chains: Sequence[Chain], gpus: int, node: int, bound: int, policy: Policy) -> Iterator[list[Piece]]:
    """Where every rank holds every stage."""
    one = {"replica": replica, "one-degree": one_degree}.get(policy)
    if one is not None:
        pieces = one(chains, gpus)
        if pieces is not None:
            yield pieces
        return
    if not any(chain.release for chain in chains):
        yield from wrap_arounds(chains, gpus, node, bound)
    yield from in_order_of_length(chains, gpus, node)


def _improved(
    module: Module,
    cost: CostModel,
    alone: list[RequestChain],
    placed: list[Cascade] | None,
    clock: Clock,
    seed: int,
) -> list[Cascade] | None:
    """The portfolio over whole segments, on the ranks that ``place`` finds for it, where that is shorter."""
    rates = _everywhere(cost, alone)
    requests = request_chains(module, rates)
    if isinstance(requests, Cascade) or any(request.chain.release for request in requests) or not clock.any_left():
        return placed
    problem, flat = _problem(requests, cost.cluster.world)
    schedule = solve(problem, clock, seed).schedule
    if placed is not None and schedule.makespan(problem) >= end_of(placed) * TICKS:
        return placed
    cascades = []
    for cascade, job, pick, start in zip(flat, problem.jobs, schedule.picks, schedule.starts, strict=True):
        degree = job.choices[pick].degree
        chosen = scheduled(cascade, rates.row(cascade, degree), degree, 0, start / TICKS)
        cascades.append(chosen.with_attrs(assigned=None))
    searched = min(quick_placements(cascades, cost), key=end_of)
    searched = placed_segments(module, list(_with_empty(requests, searched, rates)), cost)
    return searched if placed is None or end_of(searched) < end_of(placed) else placed


def _problem(requests: Sequence[RequestChain], gpus: int) -> tuple[Problem, list[Cascade]]:
    """Whole segments as jobs, and their cascades: all but those that are planned to take no step."""
    choices: dict[int, tuple[Choice, ...]] = {}
    jobs: list[Job] = []
    flat: list[Cascade] = []
    for request in requests:
        before: tuple[int, ...] = ()
        for cascade, run in zip(request.cascades, request.chain.runs, strict=True):
            if planned_steps(cascade) == 0:
                continue
            if id(run) not in choices:
                choices[id(run)] = tuple(Choice(rate.degree, rate.ticks * run.steps) for rate in run.rates)
            jobs.append(Job(choices[id(run)], before))
            flat.append(cascade)
            before = (len(jobs) - 1,)
    return Problem(tuple(jobs), gpus), flat


def _with_empty(requests: Sequence[RequestChain], placed: Sequence[Cascade], rates: Rates) -> Iterator[Cascade]:
    """Placed cascades as scheduled ones; a segment that is planned to take no step on the ranks of a neighbour."""
    named = {cascade.name: cascade for cascade in placed}
    for request in requests:
        near = next(named[c.name] for c in request.cascades if c.phase is Phase.DENOISE and c.name in named)
        for cascade in request.cascades:
            own = named.get(cascade.name)
            if own is not None:
                near = own if own.phase is Phase.DENOISE else near
                yield own.with_attrs(assigned=own.ranks, ranks=None, ulysses=None, ring=None)
                continue
            width = max(degree for degree in rates.entries(cascade) if degree <= near.width)
            row = rates.row(cascade, width)
            empty = scheduled(cascade, row, width, 0, max(near.start, _ready(cascade, named)))
            yield empty.with_attrs(assigned=near.ranks[:width])


def _ready(cascade: Cascade, named: Mapping[str, Cascade]) -> float:
    """ms at which a cascade's inputs have ended, those that are known."""
    return max((named[name].end for name in cascade.inputs if name in named), default=0.0)


def _pools(module: Module, cost: CostModel, gpus: int, node: int) -> Iterator[Plan]:
    """The first model and what comes before it on some ranks, the second and what comes behind it on the others."""
    second = models_of(module)[1:]
    behind = {c.stage for c in module.cascades if c.phase is Phase.DECODE} | set(second)
    before = {c.stage for c in module.cascades} - behind
    halves = Halves(cost, before=frozenset(before), behind=frozenset(behind))
    requests = request_chains(module, halves)
    if gpus < 2 or not second or isinstance(requests, Cascade):
        return
    borders = [
        next((k for k, cascade in enumerate(request.cascades) if cascade.stage in behind), len(request.cascades))
        for request in requests
    ]
    pieces = shared_pools([request.chain for request in requests], gpus, node, borders)
    if pieces is not None:
        yield Plan(requests, pieces, halves)


@dataclass(frozen=True)
class Halves(Rates):
    """Rates where a cascade's rank holds its own half of the stages."""

    before: frozenset[str] = frozenset()
    behind: frozenset[str] = frozenset()

    def room(self, stage: str) -> float:
        half = self.before if stage in self.before else self.behind
        return Rates(self.cost, half).room(stage)


def fits_no_rank(cascade: Cascade, cost: CostModel) -> FitsNoRank:
    """What is wrong with a request that no number of these ranks holds, and what would do."""
    rates = Rates(cost)
    needed = min(cost.memory(cascade, degree, 0, 1) for degree in cost.legal_degrees(cascade))
    state, room = rates.cost.resident_with(cascade.stage), rates.room(cascade.stage)
    remedy = "use devices with more memory, or ask for fewer frames or a lower resolution"
    degree = next((d for d in (2**k for k in range(18)) if _fits_at(cascade, cost, d, room)), None)
    if degree is not None and degree > cost.cluster.world:
        remedy = f"use a cluster of at least {degree} of these devices"
    return FitsNoRank(cascade.span, describe(cascade), needed + state, room + state, remedy)


def _fits_at(cascade: Cascade, cost: CostModel, degree: int, room: float) -> bool:
    return degree <= cascade.tokens and cost.memory(cascade, degree, 0, 1) <= room
