"""Tables and clusters of every shape: plans are valid, keep their promises, and prove nothing that is not so."""

from __future__ import annotations

import itertools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.cluster.file import parse_cluster
from arachnec.ir.nodes import Module, quantity
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.planning.duration_table import read_table
from arachnec.planning.family_placement import PRICE
from arachnec.solver.bound import NEGLIGIBLE
from tests.slow import quick

CLUSTERS = ("1:cpu", "3:cpu", "5:cpu", "12:cpu", "2x4:h20", "3x4:h20", "2x8:h20", "100:cpu", "2x72:h20")
TIMES = st.one_of(
    st.integers(1, 9), st.integers(1, 10**6), st.floats(1e-6, 1e3), st.sampled_from([1e-9, 1e9, 3e11, 0.001, 7.0])
)
ONE_DEGREE = "schedule-static{policy=one-degree}"

Task = dict[str, Any]


@st.composite
def tables(draw: st.DrawFn, world: int, most: int) -> list[Task]:
    """Tasks of one to three stages, some of them equal; every stage has a degree that the cluster allows."""
    degrees = st.one_of(st.integers(1, world), st.sampled_from([1, 2, 4, 8, 16, world]), st.integers(1, 2 * world))
    tasks: list[Task] = []
    while len(tasks) < most:
        stages = []
        for name in ("text", "vae", "dit")[-draw(st.integers(1, 3)) :]:
            legal = {draw(st.integers(1, world))} | draw(st.sets(degrees, max_size=4))
            stages.append({"stage": name, "ms": {str(degree): draw(TIMES) for degree in legal}})
        many = draw(st.sampled_from([1, 1, 2, 5]))
        tasks += [{"name": str(len(tasks)), "stages": stages}] * min(many, most - len(tasks))
        if draw(st.booleans()):
            break
    return tasks


def planned(tasks: list[Task], cluster: str, passes: str) -> Module:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "table.json"
        file.write_text(json.dumps({"unit": "ms", "tasks": tasks}))
        return Pipeline.parse(passes).run(read_table(file, parse_cluster(cluster)).module)


def wrongs(module: Module, tasks: list[Task]) -> list[str]:
    """What is wrong with a plan by the table alone; times are rounded up to a microsecond by the planner."""
    problems, ranks_held, cascades = [], [], iter(module.cascades)
    # placements are also made from the end backwards, so times are as exact as the makespan is
    slack = 1e-6 + 1e-9 * max((cascade.end for cascade in module.cascades), default=0.0)
    for task in tasks:
        ready = 0.0
        for stage in task["stages"]:
            cascade = next(cascades)
            needs = float(stage["ms"].get(str(cascade.degree), float("inf")))
            if cascade.end - cascade.start < needs - slack:
                problems.append(f"{cascade.name} runs too short")
            if cascade.start < ready - slack:
                problems.append(f"{cascade.name} starts too early")
            if len(set(cascade.ranks)) != cascade.degree or not 0 <= min(cascade.ranks) <= max(cascade.ranks) < (
                module.cluster.world if module.cluster else 0
            ):
                problems.append(f"{cascade.name} has wrong ranks")
            ready = cascade.end
            ranks_held += [(rank, cascade.start, cascade.end) for rank in cascade.ranks]
    for (a, _, end), (b, start, _) in itertools.pairwise(sorted(ranks_held)):
        if a == b and start < end - 1e-6 - 1e-9 * end:
            problems.append(f"rank {a} is in two cascades at {start}")
    last = max(cascade.end for cascade in module.cascades)
    if abs(last - makespan(module)) > 1e-6 + 1e-9 * last:
        problems.append(f"the makespan is said to be {makespan(module)}, the last ends at {last}")
    if quantity(module.attrs["bound"]) > makespan(module) * (1 + 1e-9) + 1e-6:
        problems.append("the bound is above the makespan")
    if module.attrs["proved"] is True and makespan(module) > quantity(module.attrs["bound"]) * (1 + 1e-9) + 1e-6:
        problems.append("proved, and above the bound")
    return problems


def makespan(module: Module) -> float:
    return quantity(module.attrs["makespan"])


@pytest.mark.parametrize("cluster", quick(CLUSTERS, "1:cpu", "3:cpu", "3x4:h20", "2x72:h20"))
@pytest.mark.parametrize("budget", ["budget=0ms", "steps=40"])
def test_any_table_gets_a_valid_plan_and_a_schedule_no_longer_than_one_degree_for_all(
    cluster: str, budget: str
) -> None:
    @settings(max_examples=6, deadline=None)
    @given(tables(parse_cluster(cluster).world, 8))
    def holds(tasks: list[Task]) -> None:
        scheduled = planned(tasks, cluster, f"schedule-z3{{{budget}}}")
        module = Pipeline.parse("place").run(scheduled)
        assert wrongs(module, tasks) == []
        assert makespan(scheduled) <= makespan(planned(tasks, cluster, ONE_DEGREE)) * (1 + NEGLIGIBLE) + 1e-6
        outside = 1 + PRICE * len(module.cascades)  # what is paid at most for fewer process groups
        assert makespan(module) <= makespan(scheduled) * outside * (1 + PRICE) + 1e-6

    holds()
