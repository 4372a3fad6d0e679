"""Degrees and priorities by a genetic search over list schedules, as Arachne plans.

An individual is a degree and a priority for every cascade. It is decoded by list scheduling: the ready cascade of
highest priority takes the GPUs that let it start first, preferring one node; a cascade on several nodes takes longer by
Arachne's contention penalty (``topology.penalty``). Fitness is the makespan so decoded. Tournaments choose parents,
uniform crossover mixes them, mutation moves a degree by one place or draws a priority anew, and the best two survive.
`docs/baselines.md` says what differs from the original.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from arachnec.cluster.topology import penalty
from arachnec.ir.nodes import Cluster
from arachnec.solver.bound import lower_bound
from arachnec.solver.list_schedule import degrees_for, topological
from arachnec.solver.problem import Problem, Schedule

TOURNAMENT = 3

ELITE = 2

MUTATION = 0.05  # of the genes


@dataclass(frozen=True)
class Individual:
    """For every job the index of its choice and a priority; larger goes first."""

    picks: tuple[int, ...]
    priorities: tuple[float, ...]


def evolve(
    problem: Problem,
    cluster: Cluster,
    generations: int,
    population: int,
    seed: int,
) -> Individual:
    """The best individual of all generations."""
    rng = random.Random(seed)
    bound = lower_bound(problem)
    individuals = [_first(problem, bound, rng) for _ in range(population)]
    rated = sorted(
        (decode(problem, cluster, individual)[1], number, individual) for number, individual in enumerate(individuals)
    )
    for _ in range(generations):
        children = [individual for _, _, individual in rated[:ELITE]]
        while len(children) < population:
            # the best of a few drawn at random has the lowest place
            mother, father = (rated[min(rng.choices(range(population), k=TOURNAMENT))][2] for _ in range(2))
            children.append(_mutated(problem, _crossed(mother, father, rng), rng))
        rated = sorted(
            (decode(problem, cluster, individual)[1], number, individual) for number, individual in enumerate(children)
        )
    return rated[0][2]


def decode(problem: Problem, cluster: Cluster, individual: Individual) -> tuple[Schedule, float]:
    """The list schedule of an individual, and its makespan in ticks with penalties."""
    free = [0.0] * problem.gpus
    ends = [0.0] * len(problem.jobs)
    starts = [0] * len(problem.jobs)
    for index in topological(problem, lambda j: (-individual.priorities[j], j)):
        choice = problem.jobs[index].choices[individual.picks[index]]
        ready = max((ends[j] for j in problem.jobs[index].before), default=0.0)
        ranks = _first_free(cluster, free, choice.degree, ready)
        starts[index] = math.ceil(max(ready, *(free[rank] for rank in ranks)))
        between = ranks[0] // cluster.gpus != ranks[-1] // cluster.gpus
        ends[index] = starts[index] + choice.ticks * (penalty(cluster, ranks) if between else 1.0)
        for rank in ranks:
            free[rank] = ends[index]
    return Schedule(individual.picks, tuple(starts)), max(ends, default=0.0)


def _first_free(cluster: Cluster, free: list[float], degree: int, ready: float) -> tuple[int, ...]:
    """The GPUs on which a cascade can start first; of those of one node, if that costs no time."""
    gpus = cluster.gpus
    soonest = sorted(range(len(free)), key=free.__getitem__)[:degree]
    start = max(ready, free[soonest[-1]])
    if degree <= gpus and len({rank // gpus for rank in soonest}) > 1:
        for first in range(0, len(free), gpus):
            idle = [rank for rank in range(first, first + gpus) if free[rank] <= start]
            if len(idle) >= degree:
                return tuple(idle[:degree])
    return tuple(sorted(soonest))


def _first(problem: Problem, bound: int, rng: random.Random) -> Individual:
    """Degrees for a threshold somewhere above the bound, and random priorities."""
    picks = degrees_for(problem, bound * rng.uniform(1.0, 2.0))
    return Individual(picks, tuple(rng.random() for _ in problem.jobs))


def _crossed(mother: Individual, father: Individual, rng: random.Random) -> Individual:
    mask = [rng.random() < 0.5 for _ in mother.picks]
    return Individual(
        tuple(m if hers else f for m, f, hers in zip(mother.picks, father.picks, mask, strict=True)),
        tuple(m if hers else f for m, f, hers in zip(mother.priorities, father.priorities, mask, strict=True)),
    )


def _mutated(problem: Problem, individual: Individual, rng: random.Random) -> Individual:
    picks, priorities = list(individual.picks), list(individual.priorities)
    chance = max(MUTATION, 1 / len(picks)) if picks else 0.0
    for index, job in enumerate(problem.jobs):
        if rng.random() < chance:
            picks[index] = min(max(picks[index] + rng.choice((-1, 1)), 0), len(job.choices) - 1)
        if rng.random() < chance:
            priorities[index] = rng.random()
    return Individual(tuple(picks), tuple(priorities))
