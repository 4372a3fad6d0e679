"""Chains of widths, and problems with those degrees alone."""

import random
from itertools import pairwise

import pytest

from arachnec.solver.block_packing import options_of, packings, realize
from arachnec.solver.bound import lower_bound
from arachnec.solver.budget import Clock
from arachnec.solver.large_neighbourhood import LargeNeighbourhood
from arachnec.solver.problem import Choice, Job, Problem, violations
from arachnec.solver.widths import chains, nested


@pytest.mark.parametrize(("node", "gpus"), [(8, 8), (8, 256), (4, 64), (6, 60), (5, 40), (1, 12)])
def test_each_width_divides_the_next_and_keeps_nodes_whole(node: int, gpus: int) -> None:
    chain_list = list(chains(node, gpus))
    assert len(chain_list) == len(set(chain_list))
    for widths in chain_list:
        assert widths[0] == 1 and node in widths and widths[-1] <= gpus
        assert all(wide % narrow == 0 for narrow, wide in pairwise(widths))
        assert all(node % width == 0 or width % node == 0 for width in widths)
    if node == 8:
        assert chain_list[0] == tuple(1 << exponent for exponent in range(gpus.bit_length()))


def problem_with(heads: int, gpus: int, jobs: int, seed: int) -> Problem:
    """Jobs whose work grows by a fifth at degrees that do not divide the heads."""
    rng = random.Random(seed)
    drawn = []
    for _ in range(jobs):
        work = int(2 ** rng.uniform(10, 20))
        choices: list[Choice] = []
        for degree in range(1, min(gpus, 64) + 1):
            ticks = max(1, int(work / degree * (1.0 if heads % degree == 0 else 1.2)))
            if ticks * degree < 1.5 * work and (not choices or ticks < choices[-1].ticks):
                choices.append(Choice(degree, ticks))
        drawn.append(Job(tuple(choices)))
    return Problem(tuple(drawn), gpus)


def test_heads_decide_the_widths_and_schedules_are_those_of_the_whole_problem() -> None:
    lengths = {True: 0.0, False: 0.0}
    for seed in range(4):
        problem = problem_with(24, 96, 120, seed)
        bound = lower_bound(problem)
        best, doubling = nested(problem, 8, bound)
        assert 24 in (best.problem.widths or ()) and 24 not in (doubling.problem.widths or ())
        for inside in (best, doubling):
            options = options_of(inside.problem)
            assert options is not None
            packed = list(packings(inside.problem, options, bound))[-1]
            search = LargeNeighbourhood(inside.problem, options, packed, bound, rng=random.Random(seed))
            clock = Clock(0.0, 0.0, steps=400)
            while search.run(clock):
                pass
            for packing in (packed, search.packing()):
                schedule = inside.whole(realize(inside.problem, packing))
                assert violations(problem, schedule) == []
                degrees = {job.choices[pick].degree for job, pick in zip(problem.jobs, schedule.picks, strict=True)}
                assert degrees <= set(inside.problem.widths or ())
                assert all(placed.first % placed.option.width == 0 for placed in packing.placed)
            lengths[inside is best] += schedule.makespan(problem) / bound
    assert 4 <= lengths[True] <= lengths[False]


def test_a_job_without_any_of_the_degrees_leaves_the_way_out() -> None:
    problem = Problem((Job((Choice(3, 100),)), Job((Choice(1, 100), Choice(2, 60)))), 8)
    assert nested(problem, 8, lower_bound(problem)) == []
