"""A costed module of requests to a schedule on ranks: degrees, borders of segments, order, residency, and a bound.

Ways are tried in the order of what they take, milliseconds first, and each is judged as placed on ranks:

1. Every rank holds all stages, where the memory allows it: wrap-around over aligned blocks (``solver.malleable``), one
   degree for all, and the portfolio of ``solver.search`` over whole segments, which proves small instances.
   Where requests arrive over time or latencies count, by insertion and a local search (``latency_plans``).
2. Encoders and decoders on ranks of their own, beside the models; so over time, too.
3. Two pools, one for each model: every share and degree by enumeration. Where the memory does not hold both models this
   is all there is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Literal, TypeAlias

from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Cascade, Level, Module, Phase
from arachnec.ir.sampling import CODING, Objective, arrival_of, models_of, objective_ms, planned_steps
from arachnec.ir.stage_sizes import shape_of
from arachnec.ir.values import Quantity
from arachnec.planning.placement import end_of, quick_placements
from arachnec.planning.sampling.chains import (
    Rates,
    RequestChain,
    placed_segments,
    request_chains,
    scheduled,
    with_pieces,
)
from arachnec.planning.sampling.least_cluster import fits_no_rank, not_this_way
from arachnec.planning.sampling.policies import (
    MEASURED,
    coding_apart,
    improved_pieces,
    in_order_of_length,
    insertion_plans,
    measure,
    one_degree,
    replica,
    shared_pools,
    side_by_side,
    wrap_arounds,
)
from arachnec.planning.sampling.requests import batched, demand_requests
from arachnec.planning.sampling.rounds import moved, with_memory
from arachnec.solver.budget import Clock
from arachnec.solver.insertion_search import Measure
from arachnec.solver.malleable import Chain, Piece, least_makespan
from arachnec.solver.problem import TICKS, Choice, Job, Problem
from arachnec.solver.search import solve

CLOSE = 1e-3  # of the bound, from which on nothing else is tried
BATCHES = (2, 4, 8)  # sizes that are tried
SAVED = 5e-3  # of the work of a request, from which on a batch is worth a try
PLACINGS = 7  # what a schedule of the portfolio takes to be placed, in times of what one takes that has ranks
PLACING = 1.0  # ms that a piece takes to be placed
LATE = 5.0  # ms by which the portfolio ends late, and in which a plan is told
Pieces: TypeAlias = Iterator[list[Piece]]
Policy = Literal["search", "replica", "one-degree", "two-pools"]


def planned(
    module: Module,
    clock: Clock,
    *,
    policy: Policy = "search",
    objective: Objective = "makespan",
    batch: int = 1,
    seed: int = 0,
) -> Module:
    """The module at level ``scheduled``, each cascade with the ranks that the plan chose as ``assigned``.

    The search tries batches of up to ``batch`` equal requests where that saves work. Raises UserError where a request
    fits no rank, and for a module that does not say its steps and models.
    """
    demand_requests(module)
    cost = CostModel(module)
    most = batch if policy == "search" and saves_by_batches(module, cost) else 1
    costs = [cost, *(CostModel(batched(module, size)) for size in BATCHES if size <= most)]
    alone = [request_chains(own.module, Rates(own, down=True)) for own in costs]
    if isinstance(alone[0], Cascade):
        raise fits_no_rank(alone[0], cost, partial(_fits, policy=policy))
    sizes = _batches(alone[0], [chains for chains in alone[1:] if not isinstance(chains, Cascade)])
    arrivals = {clip.id: arrival_of(clip) for clip in module.clips}
    names: set[Objective] = {"makespan", objective}
    bounds = {name: MEASURED[name].bound(alone[0], arrivals, sizes, cost.cluster.world) for name in names}
    bound, least = round(bounds["makespan"]), bounds[objective]
    fitting = [own for own, chains in zip(costs, alone, strict=True) if not isinstance(chains, Cascade)]
    fitting = fitting if sizes else [cost]
    plans = [plan for own in fitting for plan in _plans(own, bound, least, policy, objective)]
    if policy == "search" and (objective != "makespan" or any(arrivals.values())):
        placed = _over_time(module, fitting, plans, Aim(objective, least), clock, seed)
    else:
        best = min(plans, key=lambda plan: plan.value(objective), default=None)
        before = clock.spent()
        cost = cost if best is None else best.rates.cost
        placed = None if best is None else _placed(best)
        if policy == "search" and not is_close(placed, bound):
            ending = PLACINGS * (clock.spent() - before) + (LATE if clock.steps is None else 0.0)
            placed = _improved(cost.module, cost, placed, clock.slice(clock.left() - ending), seed)
    if placed is None:
        raise not_this_way(policy, cost, partial(_fits, policy=policy))
    makespan = end_of(placed)
    # a segment that was cut reads what the one before it hands on
    placed = with_memory(replace(module, cascades=tuple(placed)), placed)
    value = _value(module, placed, objective)
    return replace(
        module,
        level=Level.SCHEDULED,
        cascades=tuple(c.with_attrs(assigned=c.ranks, ranks=None, ulysses=None, ring=None) for c in placed),
        attrs=module.attrs.updated(
            makespan=Quantity(makespan, "ms"),
            objective=objective if objective != "makespan" else None,
            bound=Quantity(least / TICKS, "ms"),
            area_bound=Quantity(least / TICKS, "ms"),
            proved=value <= least / TICKS * (1 + 1e-9),
        ),
    )


def saves_by_batches(module: Module, cost: CostModel) -> bool:
    """Whether pairs of equal requests would save a part of all work worth a try, as one rank does it."""
    kinds = Counter(shape_of(cascade) for cascade in module.cascades if len(cascade.clips) == 1)
    first = {shape_of(cascade): cascade for cascade in reversed(module.cascades)}
    total = saved = 0.0
    for shape, count in kinds.items():
        alone, pair = first[shape], replace(first[shape], batch=2)
        ms = cost.time(alone, 1, side=1)
        total += count * ms
        saved += count // 2 * (2 * ms - cost.time(pair, 1, side=1)) if "switch" not in alone.attrs else 0.0
    return saved > SAVED * total


def _batches(
    alone: Sequence[RequestChain], others: Sequence[list[RequestChain]]
) -> dict[Chain, list[tuple[int, Chain]]]:
    """Of chains of one request, those of batches of them that need less work a request; none where none does."""
    single = {request.requests[0]: request.chain for request in alone if len(request.requests) == 1}
    sizes: dict[Chain, dict[int, Chain]] = {}
    for request in (request for requests in others for request in requests if len(request.requests) > 1):
        own, size = single.get(request.requests[0]), len(request.requests)
        if own is not None and request.chain.least_area(math.inf) < size * own.least_area(math.inf) * (1 - SAVED):
            sizes.setdefault(own, {})[size] = request.chain
    return {chain: list(ways.items()) for chain, ways in sizes.items()}


def _fits(module: Module, policy: Policy) -> bool:
    """Whether the policy has a plan, however long it takes."""
    cost = CostModel(module)
    alone = request_chains(module, Rates(cost, down=True))
    if isinstance(alone, Cascade):
        return False
    bound = least_makespan([request.chain for request in alone], cost.cluster.world)
    return next(_plans(cost, bound, bound, policy), None) is not None


def _value(module: Module, placed: Sequence[Cascade], objective: Objective) -> float:
    """The objective of placed cascades, in ms."""
    whole = replace(module, cascades=tuple(placed))
    return objective_ms(whole, {cascade.name: cascade.end for cascade in placed}, objective)


def is_close(placed: Sequence[Cascade] | None, bound: int) -> bool:
    """Whether a plan's makespan is so close to the bound that nothing else is worth its time."""
    return placed is not None and end_of(placed) * TICKS <= bound * (1 + CLOSE)


@dataclass(frozen=True)
class Aim:
    """What is preferred over time: the least of the objective. Of makespans close to the bound, ``least`` ticks, that
    of least mean latency: where the last arrival decides about the makespan, it says nothing of the other requests."""

    objective: Objective
    least: float

    def measure(self, requests: Sequence[RequestChain]) -> Measure:
        """Of ends in ticks."""
        of_ends = measure(requests, self.objective)
        if self.objective != "makespan":
            return of_ends

        def preferred(ends: Sequence[int]) -> tuple[float, float]:
            value, other = of_ends(ends)
            return max(value, self.least * (1 + CLOSE)), other

        return preferred

    def of_plan(self, plan: Plan) -> tuple[float, float]:
        return self.measure(plan.requests)(plan.ends())

    def of_cascades(self, requests: Sequence[RequestChain], placed: Sequence[Cascade]) -> tuple[float, float]:
        ends: dict[tuple[int, ...], float] = {}
        for cascade in placed:
            ends[cascade.clips] = max(ends.get(cascade.clips, 0.0), cascade.end)
        return self.measure(requests)([round(ends[request.requests] * TICKS) for request in requests])


@dataclass(frozen=True)
class Plan:
    """Pieces of chains on ranks, not yet cascades."""

    requests: list[RequestChain]
    pieces: list[Piece]
    rates: Rates

    def value(self, objective: Objective) -> float:
        """Ticks: the makespan, or a statistic of the requests' latencies."""
        return measure(self.requests, objective)(self.ends())[0]

    def ends(self) -> list[int]:
        """Ticks at which each request ends."""
        ends = [0] * len(self.requests)
        for piece in self.pieces:
            ends[piece.chain] = max(ends[piece.chain], piece.end)
        return ends

    def cascades(self) -> list[Cascade]:
        return with_pieces(self.rates.cost.module, self.requests, self.pieces, self.rates)


def _plans(
    cost: CostModel, bound: int, least: float, policy: Policy, objective: Objective = "makespan"
) -> Iterator[Plan]:
    """What policies make of the chains, one way after another. ``bound`` is of the makespan, ``least`` of the
    objective."""
    module = cost.module
    gpus, node = cost.cluster.world, cost.cluster.gpus
    fits_together = False
    if policy != "two-pools":
        together = _everywhere(module, cost)
        requests = request_chains(module, together)
        fits_together = not isinstance(requests, Cascade)
        if not isinstance(requests, Cascade):
            for pieces in _together([request.chain for request in requests], gpus, node, bound, policy):
                plan = Plan(requests, pieces, together)
                yield plan
                if policy == "search" and plan.value(objective) <= least * (1 + CLOSE):
                    return
    if policy == "search" and objective == "makespan" and not any(map(arrival_of, module.clips)):
        yield from _apart(cost, bound, lambda models, left: iter(()))
    if policy in ("search", "two-pools"):
        yield from _pools(module, cost, gpus, node, models_only=policy == "two-pools" or fits_together)


def _apart(cost: CostModel, bound: int, others: Callable[[Sequence[Chain], int], Pieces]) -> Iterator[Plan]:
    """Encoders and decoders on ranks of their own: prompts are encoded and latents decoded beside the models."""
    module, gpus, node = cost.module, cost.cluster.world, cost.cluster.gpus
    coding = frozenset(cascade.stage for cascade in module.cascades if cascade.phase in CODING)
    halves = Halves(cost, before=frozenset(models_of(module)), behind=coding)
    requests = request_chains(module, halves) if coding else []
    if isinstance(requests, Cascade):
        return
    chains = [request.chain for request in requests]
    kinds = [[cascade.phase in CODING for cascade in request.cascades] for request in requests]
    parts = [(row.index(False), len(row) - row[::-1].index(False)) for row in kinds]
    for share in sorted({1, 2, gpus // 8}) if requests else ():
        if 0 < share < gpus:
            for pieces in coding_apart(chains, gpus, node, bound, parts, share, others):
                yield Plan(requests, pieces, halves)


def _everywhere(module: Module, cost: CostModel) -> Rates:
    """Rates where every rank holds all stages."""
    return Rates(cost, {cascade.stage for cascade in module.cascades})


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
        parallel = side_by_side(chains, gpus, node, bound)
        if parallel is not None:
            yield parallel
    yield from in_order_of_length(chains, gpus, node)


def _placed(plan: Plan) -> list[Cascade]:
    return placed_segments(plan.rates.cost.module, plan.cascades(), plan.rates.cost)


def _over_time(
    module: Module, costs: Sequence[CostModel], plans: Sequence[Plan], aim: Aim, clock: Clock, seed: int
) -> list[Cascade] | None:
    """The best of the ``plans``, or what insertion and a local search make, whichever is preferred as placed."""
    ways: list[Plan] = []
    others = list(plans)
    for cost in costs:
        gpus, node = cost.cluster.world, cost.cluster.gpus
        rates = _everywhere(cost.module, cost)
        requests = request_chains(cost.module, rates)
        if not isinstance(requests, Cascade):
            new = insertion_plans([request.chain for request in requests], gpus, node, aim.objective, clock)
            ways += [Plan(requests, pieces, rates) for pieces in new]

        most = 1 if ways else None  # with ranks that hold all stages a search goes on

        def inserted(models: Sequence[Chain], left: int, node: int = node, most: int | None = most) -> Pieces:
            return islice(insertion_plans(models, left, node, aim.objective, clock), most)

        others += _apart(cost, 0, inserted)
    best = min(others, key=aim.of_plan, default=None)
    if not ways:
        return None if best is None else _placed(best)
    ways += [plan for plan in others if not isinstance(plan.rates, Halves)]
    plan = min(ways, key=aim.of_plan)
    cluster = plan.rates.cost.cluster
    ending = PLACING * len(plan.pieces) + LATE if clock.steps is None else 0.0
    within = clock.slice(clock.left() - ending)
    wanted = aim.measure(plan.requests)
    pieces = improved_pieces(plan.requests, plan.pieces, cluster.world, cluster.gpus, wanted, within, seed)
    placed = _placed(replace(plan, pieces=pieces))
    if best is None or aim.of_cascades(plan.requests, placed) <= aim.of_plan(best):
        return placed
    other = _placed(best)
    return min((plan, placed), (best, other), key=lambda way: aim.of_cascades(way[0].requests, way[1]))[1]


def _improved(
    module: Module,
    cost: CostModel,
    placed: list[Cascade] | None,
    clock: Clock,
    seed: int,
) -> list[Cascade] | None:
    """The portfolio over whole segments, on the ranks that ``place`` finds for it, where that is shorter."""
    rates = _everywhere(module, cost)
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
        ready = 0.0  # ms at which what stands before it in the chain has ended
        for cascade in request.cascades:
            own = named.get(cascade.name)
            if own is not None:
                own = moved(own, max(0.0, ready - own.start))
                near, ready = own if own.phase is Phase.DENOISE else near, max(ready, own.end)
                yield own.with_attrs(assigned=own.ranks, ranks=None, ulysses=None, ring=None)
                continue
            width = max(degree for degree in rates.entries(cascade) if degree <= near.width)
            row = rates.row(cascade, width)
            empty = scheduled(cascade, row, width, 0, max(near.start, ready))
            ready = empty.end
            yield empty.with_attrs(assigned=near.ranks[:width])


def _pools(module: Module, cost: CostModel, gpus: int, node: int, *, models_only: bool) -> Iterator[Plan]:
    """The first stages of the chains on some ranks, the others on the rest, by where the chain is parted.

    With ``models_only`` it is parted between the models alone.
    """
    models = models_of(module)
    encoders, decoders = ([c.stage for c in module.cascades if c.phase is phase] for phase in CODING)
    order = list(dict.fromkeys((*encoders, *models, *decoders)))
    for place in range(1, len(order)) if gpus > 1 else ():
        before, behind = frozenset(order[:place]), frozenset(order[place:])
        parted = models[0] in before and models[-1] in behind and len(models) > 1
        if parted or not models_only:
            yield from _two_pools(module, cost, Halves(cost, before=before, behind=behind), gpus, node)


def _two_pools(module: Module, cost: CostModel, halves: Halves, gpus: int, node: int) -> Iterator[Plan]:
    requests = request_chains(module, halves)
    if isinstance(requests, Cascade):
        return
    borders = [
        next((k for k, c in enumerate(request.cascades) if c.stage in halves.behind), len(request.cascades))
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
