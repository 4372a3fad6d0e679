"""Find partition, placement and schedule of a pipeline together (AdaPtis, 2509.23722, section 5).

The search begins from several plans: one to three stages a rank, dealt out in turn (interleaved) or there and back
(wave), each evenly and balanced. Then it repairs the bottleneck that the model names, move by move, from the best few.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from arachnec.ir.diagnostic import user_error
from arachnec.pipelining.errors import fits_nowhere
from arachnec.pipelining.order_search import list_schedule
from arachnec.pipelining.pipeline_model import Performance, PipelineInstance, PipelinePlan, order_problem, performance

STEPS = 3000
BALANCE_WARMTH = 0.03  # of a rank's even share

Load = tuple[float, float, float]


def even_sizes(layers: int, stages: int) -> tuple[int, ...]:
    """Layers dealt out in order, the first stages one more where they do not divide."""
    whole, rest = divmod(layers, stages)
    return tuple(whole + (stage < rest) for stage in range(stages))


def balanced_sizes(instance: PipelineInstance, placement: Sequence[int], seed: int = 0) -> tuple[int, ...]:
    """First what overflows a rank's memory is least, then the busiest rank's time, then the sum of their squares.

    With one stage a rank this is the textbook's linear partition; with several the sums over a rank's stages count, and
    simulated annealing over the cuts finds them.
    """
    rng = random.Random(seed)
    works = [layer.forward + layer.activation_gradient + layer.weight_gradient for layer in instance.layers]
    work = (0.0, *accumulate(works))
    # one micro-batch must fit beside the state
    state = (0.0, *accumulate(layer.state + layer.saved for layer in instance.layers))
    stages = len(placement)
    cuts = [0, *accumulate(even_sizes(len(works), stages))]

    def load(cuts: Sequence[int]) -> Load:
        busy, held = [0.0] * instance.ranks, [0.0] * instance.ranks
        for stage, rank in enumerate(placement):
            busy[rank] += (work[cuts[stage + 1]] - work[cuts[stage]]) / instance.speeds[rank]
            held[rank] += state[cuts[stage + 1]] - state[cuts[stage]]
        over = sum(max(0.0, a - b) for a, b in zip(held, instance.memory, strict=True))
        return over, max(busy), sum(time * time for time in busy)

    now = load(cuts)
    best, best_cuts = now, cuts
    warmth = BALANCE_WARMTH * work[-1] / sum(instance.speeds)
    for step in range(STEPS if stages > 1 else 0):
        moved = list(cuts)
        for _ in range(rng.choice((1, 1, 2, 3))):
            moved[rng.randrange(1, stages)] += rng.choice((-1, 1))
        if any(a >= b for a, b in pairwise(moved)):
            continue
        after = load(moved)
        worse = after[1] - now[1]
        warm = warmth * (1 - step / STEPS)
        if after <= now or (after[0] <= now[0] and rng.random() < math.exp(-max(0.0, worse) / warm)):
            now, cuts = after, moved
            if now < best:
                best, best_cuts = now, cuts
    return tuple(b - a for a, b in pairwise(best_cuts))


MOST_STAGES_A_RANK = 3
SEEDS = 4  # plans that are repaired
WARMTH = 0.001  # of the step: by how much a plan may be longer and still be kept in a third of all cases, at first
SHARES = (1.0, 0.8, 0.65, 0.5)  # of its free memory that a rank may fill: less holds forwards back


@dataclass(frozen=True)
class Candidate:
    """A plan before it is scheduled, and how much of the memory it uses."""

    sizes: tuple[int, ...]
    placement: tuple[int, ...]
    share: float = 1.0


@dataclass(frozen=True)
class FoundPlan:
    """A plan, what it costs, and what the search called its bottleneck on the way, first to last."""

    plan: PipelinePlan
    performance: Performance
    repaired: tuple[str, ...]


def interleaved(ranks: int, stages_a_rank: int) -> tuple[int, ...]:
    """Stage s on rank s mod p."""
    return tuple(stage % ranks for stage in range(ranks * stages_a_rank))


def wave(ranks: int, stages_a_rank: int) -> tuple[int, ...]:
    """There and back: the last rank has two stages that follow each other, then the first."""
    down = tuple(range(ranks))
    return tuple(rank for turn in range(stages_a_rank) for rank in (down if turn % 2 == 0 else down[::-1]))


def find_plan(instance: PipelineInstance, *, tries: int = 250, seed: int = 0) -> FoundPlan:
    """The best plan of ``tries`` repairs of each of the best seeds.

    No rank ever holds more than its memory. Same instance, seed and number of tries, same plan. UserError if there are
    more ranks than layers, or no seed fits into the memory.
    """
    if len(instance.layers) < instance.ranks:
        raise user_error(
            f"a pipeline of {instance.ranks} ranks for {len(instance.layers)} layers",
            help=f"every rank needs a layer: give at most {len(instance.layers)} ranks",
        )
    decoded = [pair for candidate in _seeds(instance, seed) if (pair := _decoded(instance, candidate))]
    if not decoded:
        raise fits_nowhere(len(instance.layers), instance.ranks)
    best_first = sorted(decoded, key=lambda pair: pair[1].performance.makespan)
    repaired = [
        _repaired(instance, candidate, plan, tries, seed + k) for k, (candidate, plan) in enumerate(best_first[:SEEDS])
    ]
    return min(repaired, key=lambda plan: plan.performance.makespan)


def _seeds(instance: PipelineInstance, seed: int) -> Iterator[Candidate]:
    layers = len(instance.layers)
    for stages_a_rank in range(1, MOST_STAGES_A_RANK + 1):
        if instance.ranks * stages_a_rank > layers:
            return
        for placement in dict.fromkeys(
            (interleaved(instance.ranks, stages_a_rank), wave(instance.ranks, stages_a_rank))
        ):
            for sizes in (balanced_sizes(instance, placement, seed), even_sizes(layers, len(placement))):
                yield Candidate(sizes, placement)


def _decoded(instance: PipelineInstance, candidate: Candidate) -> tuple[Candidate, FoundPlan] | None:
    """The candidate with its list schedule; None if that does not fit."""
    problem = order_problem(instance, candidate.sizes, candidate.placement)
    shared = [limit * candidate.share for limit in problem.limits]
    try:
        schedule = list_schedule(replace(problem, limits=shared), range(instance.micro_batches), split=True)[1]
    except ValueError:
        return None
    plan = PipelinePlan(candidate.sizes, candidate.placement, schedule)
    return candidate, FoundPlan(plan, performance(instance, plan), ())


def _repaired(instance: PipelineInstance, candidate: Candidate, current: FoundPlan, tries: int, seed: int) -> FoundPlan:
    """Moves against the bottleneck; one that makes the step longer is kept now and then, at first."""
    rng = random.Random(seed)
    best, named = current, [str(current.performance.bottleneck)]
    for step in range(tries):
        moved = _move(instance, candidate, current.performance, rng)
        decoded = _decoded(instance, moved) if moved != candidate else None
        if decoded is None:
            continue
        worse = decoded[1].performance.makespan - current.performance.makespan
        warmth = WARMTH * best.performance.makespan * (1 - step / tries)
        if worse > 0 and rng.random() >= math.exp(-worse / warmth):
            continue
        candidate, current = decoded
        if current.performance.bottleneck != named[-1]:
            named.append(current.performance.bottleneck)
        best = min(best, current, key=lambda plan: plan.performance.makespan)
    return FoundPlan(best.plan, best.performance, tuple(named))


def _move(instance: PipelineInstance, candidate: Candidate, costs: Performance, rng: random.Random) -> Candidate:
    """One change that eases what is named: work or bytes leave the fullest rank, or stages and forwards move."""
    if costs.bottleneck == "communication" and rng.random() < 0.5:
        return _swapped(candidate, rng)
    if costs.bottleneck in ("compute", "memory") and rng.random() < 0.7:
        loads = costs.compute if costs.bottleneck == "compute" else costs.memory
        fullest = max(range(instance.ranks), key=loads.__getitem__)
        own = [stage for stage, rank in enumerate(candidate.placement) if rank == fullest]
        others = [stage for stage, rank in enumerate(candidate.placement) if rank != fullest]
        return _layer_moved(candidate, rng.choice(own), rng.choice(others)) if others else candidate
    kind = rng.random()
    if kind < 0.25:
        return replace(candidate, share=rng.choice(SHARES))
    if kind < 0.6:
        return _swapped(candidate, rng)
    stages = range(len(candidate.sizes))
    return _layer_moved(candidate, rng.choice(stages), rng.choice(stages))


def _swapped(candidate: Candidate, rng: random.Random) -> Candidate:
    """Two stages change their ranks."""
    placement = list(candidate.placement)
    a, b = rng.randrange(len(placement)), rng.randrange(len(placement))
    placement[a], placement[b] = placement[b], placement[a]
    return replace(candidate, placement=tuple(placement))


def _layer_moved(candidate: Candidate, giver: int, taker: int) -> Candidate:
    """One layer less here and one more there; the stages between shift along."""
    sizes = list(candidate.sizes)
    if giver == taker or sizes[giver] == 1:
        return candidate
    sizes[giver] -= 1
    sizes[taker] += 1
    return replace(candidate, sizes=tuple(sizes))
