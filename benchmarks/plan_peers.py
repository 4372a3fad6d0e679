"""Other solvers on the problems of ``plan_video_mix``: CP-SAT (ortools), HiGHS (scipy) and Arachne's genetic search.

CP-SAT gets optional intervals under one cumulative constraint, which is exact; HiGHS the aligned blocks of
``arachnec.solver.block_packing`` as a mixed integer program. Each is given the problem, the wall time and two
cores, and no start. The genetic search runs its generations to the end, however long that takes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from arachnec.cluster.file import parse_cluster
from arachnec.solver.block_packing import Packing, Placed, options_of, realize
from arachnec.solver.problem import Problem, Schedule

CORES = 2
MOST_DECODED = 64
MOST_BOOLEANS = 400_000  # beyond, building the model alone outlasts the budget


@dataclass(frozen=True)
class Answer:
    """``schedule`` is None where none was found in time; seconds include making the model."""

    schedule: Schedule | None
    proved: bool
    seconds: float
    first_ms: float | None = None  # when the first complete schedule was there; None where that is not known
    bound: float = 0.0  # ticks, where the solver has one


def cp_sat(problem: Problem, seconds: float) -> Answer:
    """Optional intervals, one per job and degree, under one cumulative constraint, and precedence between starts."""
    from ortools.sat.python import cp_model

    started = time.perf_counter()
    model = cp_model.CpModel()
    horizon = sum(job.choices[0].ticks * job.choices[0].degree for job in problem.jobs)
    makespan = model.new_int_var(0, horizon, "makespan")
    intervals, demands, rows, areas = [], [], [], []
    for j, job in enumerate(problem.jobs):
        start = model.new_int_var(0, horizon, f"start_{j}")
        row = []
        for k, choice in enumerate(job.choices):
            here = model.new_bool_var(f"pick_{j}_{k}")
            intervals.append(model.new_optional_fixed_size_interval_var(start, choice.ticks, here, f"run_{j}_{k}"))
            demands.append(choice.degree)
            model.add(start + choice.ticks <= makespan).only_enforce_if(here)
            areas.append(choice.area * here)
            row.append(here)
        model.add_exactly_one(row)
        for i in job.before:
            earlier, ran = rows[i]
            for here, choice in zip(ran, problem.jobs[i].choices, strict=True):
                model.add(earlier + choice.ticks <= start).only_enforce_if(here)
        rows.append((start, row))
    model.add_cumulative(intervals, demands, problem.gpus)
    model.add(sum(areas) <= problem.gpus * makespan)
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = CORES
    solver.parameters.max_time_in_seconds = max(0.01, seconds - (time.perf_counter() - started))
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Answer(None, False, time.perf_counter() - started, bound=solver.best_objective_bound)
    picks = tuple(next(k for k, here in enumerate(row) if solver.value(here)) for _, row in rows)
    schedule = Schedule(picks, tuple(int(solver.value(start)) for start, _ in rows))
    proved = status == cp_model.OPTIMAL
    return Answer(schedule, proved, time.perf_counter() - started, bound=solver.best_objective_bound)


def highs(problem: Problem, seconds: float) -> Answer:
    """Blocks as a mixed integer program; ``proved`` is never claimed, since unaligned sets may be shorter."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_array

    started = time.perf_counter()
    options = options_of(problem)
    if options is None:
        return Answer(None, False, 0.0)
    where = [
        Placed(j, option, first)
        for j, row in enumerate(options)
        for option in row
        for first in range(0, problem.gpus - option.width + 1, option.width)
    ]
    if len(where) > MOST_BOOLEANS:
        return Answer(None, False, 0.0)
    columns = np.arange(len(where))
    one = csr_array(
        (np.ones(len(where)), ([placed.job for placed in where], columns)), shape=(len(options), len(where) + 1)
    )
    scale = float(max(option.ticks for row in options for option in row))
    rows, cols, values = [], [], []
    for column, placed in enumerate(where):
        for gpu in range(placed.first, placed.first + placed.option.width):
            rows.append(gpu)
            cols.append(column)
            values.append(placed.option.ticks / scale)
    rows += range(problem.gpus)
    cols += [len(where)] * problem.gpus
    values += [-1.0] * problem.gpus
    loads = csr_array((values, (rows, cols)), shape=(problem.gpus, len(where) + 1))
    cost = np.zeros(len(where) + 1)
    cost[-1] = 1.0
    left = seconds - (time.perf_counter() - started)
    if left <= 0:
        return Answer(None, False, time.perf_counter() - started)
    answer = milp(
        cost,
        integrality=np.array([1] * len(where) + [0]),
        bounds=Bounds(0, np.array([1.0] * len(where) + [np.inf])),
        constraints=[LinearConstraint(one, 1, 1), LinearConstraint(loads, -np.inf, 0)],
        options={"time_limit": left},
    )
    seconds_spent = time.perf_counter() - started
    if answer.x is None:
        return Answer(None, False, seconds_spent)
    placed = tuple(place for place, value in zip(where, answer.x, strict=False) if value > 0.5)
    return Answer(realize(problem, Packing(placed, ())), False, seconds_spent)


def arachne_ga(problem: Problem, seconds: float) -> Answer:
    """60 generations of 40; not tried above ``MOST_DECODED`` jobs, where one decoding takes tens of milliseconds."""
    from arachnec.planning.baselines.genetic import decode, evolve

    started = time.perf_counter()
    if len(problem.jobs) > MOST_DECODED:
        return Answer(None, False, 0.0)
    cluster = parse_cluster(f"{problem.gpus // 8}x8:h100-80g")
    best = evolve(problem, cluster, 60, 40, 0)
    schedule = decode(problem, cluster, best)[0]
    return Answer(schedule, False, time.perf_counter() - started)
