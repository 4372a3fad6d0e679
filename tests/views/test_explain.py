"""Explanations: what they say is what the cost model says, and what would be different is planned, not guessed."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arachnec.cluster.file import parse_cluster
from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Cluster, Level, Module, Phase, quantity
from arachnec.ir.parser import parse_module
from arachnec.ir.values import Attributes, Quantity
from arachnec.lowering.programs import lower
from arachnec.passes.infra.base import Pass, Scope
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.planning.formulate import problem_of
from arachnec.planning.lower_bounds import bound_parts
from arachnec.solver.bound import lower_bound
from arachnec.solver.problem import TICKS
from arachnec.views.explain import explain
from arachnec.views.format import ms
from arachnec.views.timeline import planned
from arachnec.views.what_if import Answer, begin_of, questions, sentences, what_if, with_budget
from tests.passes.plans import cluster, placed_modules

PLAN = Path(__file__).parents[1] / "commands" / "explain" / "plan.cascade"
PASSES = Pipeline.parse("schedule-z3{steps=0},place,bucket,lower,check")


def plan() -> Module:
    return parse_module(PLAN.read_text(encoding="utf-8"))


def of_times(pod: Cluster, *times: dict[int, float], chained: bool = False) -> Module:
    """Cascades of measured times; chained, each waits for the one before it."""
    some = begin_of(plan())
    cascades = [
        replace(
            some.cascades[1],
            name=f"c{i}",
            clips=(i,),
            tokens=100,
            inputs=(f"c{i - 1}",) if chained and i else (),
            attrs=Attributes.of(times=tuple((d, Quantity(t, "ms")) for d, t in row.items())),
        )
        for i, row in enumerate(times)
    ]
    return replace(some, cluster=pod, cascades=tuple(cascades), stages=some.stages[1:])


@given(placed_modules())
def test_every_plan_can_be_explained_in_whole_sentences(module: Module) -> None:
    for section in explain(lower(module)):
        assert section.sentences or section.title == "Idle time"
        for sentence in section.sentences:
            assert sentence.endswith((".", "..."))
            assert "nan" not in sentence.split()
            assert "inf" not in sentence


def test_degrees_are_explained_by_what_the_cost_model_says_of_the_next_ones() -> None:
    module = plan()
    cost = CostModel(module)
    said = {section.title: section.sentences for section in explain(module)}["Degrees"]
    for cascade in module.cascades:
        line = next((line for line in said if line.startswith(f"%{cascade.name} ")), None)
        if line is None or cascade.degree == 1:
            continue
        for degree in (cascade.degree - 1, cascade.degree + 1):
            if degree in cost.legal_degrees(cascade) and (again := cost.recompute_at(cascade, degree)) is not None:
                assert (
                    f"At {degree}{', recomputing,' if again and not cascade.recomputes else ''} it would take" in line
                )
                assert ms(cost.time(cascade, degree, recompute=again)) in line


def test_a_degree_that_does_not_fit_is_said_not_to() -> None:
    module = plan()
    trained = tuple(replace(c, inputs=()) for c in module.cascades if c.phase is Phase.TRAIN)
    tight = grown(module, memory=Quantity(68.0, "GiB"))
    squeezed = replace(module, cluster=tight, stages=module.stages[1:], cascades=trained)
    said = {section.title: section.sentences for section in explain(squeezed)}["Degrees"]
    assert any("At 7 it would not fit" in line for line in said)


def test_recomputing_cascades_are_named_with_what_they_would_need() -> None:
    module = plan()
    said = {section.title: section.sentences for section in explain(module)}["Recomputation"]
    again = [cascade for cascade in module.cascades if cascade.recomputes]
    assert [line.split()[0] for line in said[1:]] == [f"%{cascade.name}" for cascade in again]
    need = CostModel(module).memory(again[0], again[0].degree)
    assert f"needs {need:.3g} GiB" in said[1]


@given(placed_modules())
def test_the_parts_of_the_bound_hold_together(module: Module) -> None:
    parts = bound_parts(module)
    assert parts.bound == lower_bound(problem_of(module, CostModel(module))) / TICKS
    assert max(parts.work, parts.longest) <= parts.bound + 1e-3
    for less in (parts.without_memory, parts.without_precedence, parts.without_communication):
        assert less <= parts.bound
    named = {cascade.name: cascade for cascade in module.cascades}
    for before, after in pairwise(parts.chain):
        assert before in named[after].inputs
    times = (min(CostModel(module).options(named[name]).values()) for name in parts.chain)
    assert sum(times) == pytest.approx(parts.longest, abs=0.01)


def test_each_cause_of_a_bound_is_told_from_the_others() -> None:
    pod = cluster(gpus=4)
    assert bound_parts(of_times(pod, *[{1: 10.0}] * 8)).cause == "work"
    assert bound_parts(of_times(pod, {1: 10.0}, {1: 50.0}, {1: 10.0})).cause == "chain"
    chained = bound_parts(of_times(pod, {1: 10.0}, {1: 50.0}, {1: 10.0}, chained=True))
    assert (chained.cause, chained.chain, chained.without_precedence) == ("chain", ("c0", "c1", "c2"), 50.0)
    assert bound_parts(of_times(pod, {3: 10.0}, {3: 10.0})).cause == "wide"


def test_every_answer_is_what_planning_anew_comes_to() -> None:
    module = plan()
    begin = begin_of(module)
    answers = {answer.title: answer.iteration_ms for answer in what_if(begin, begin, PASSES, module, 0.0)}
    assert answers["as it is, planned again"] == planned(PASSES.run(begin)).end
    by_hand = {
        "One more node (12 in all instead of 8)": replace(begin, cluster=grown(begin, nodes=3)),
        "Twice the memory on each (158 GiB)": replace(begin, cluster=grown(begin, memory=Quantity(158.0, "GiB"))),
        "Clips encoded beforehand": replace(
            begin,
            stages=begin.stages[1:],
            cascades=tuple(replace(c, inputs=()) for c in begin.cascades if c.phase is Phase.TRAIN),
        ),
    }
    for title, changed in by_hand.items():
        assert answers[title] == planned(PASSES.run(changed)).end, title


def test_what_was_decided_for_the_model_is_decided_again_for_other_machines_only() -> None:
    decided_for = []

    class Decide(Pass):
        needs = gives = Level.TRACED
        scope = Scope.MODEL

        def run(self, module: Module) -> Module:
            assert module.cluster is not None
            decided_for.append((module.cluster.world, module.cluster.memory))
            return module

    module = plan()
    begin = begin_of(module)
    what_if(begin, begin, Pipeline((Decide(), *PASSES.passes)), module, 0.0)
    assert decided_for == [(12, 79.0), (8, 158.0)]


def grown(module: Module, **values: int | Quantity) -> Cluster:
    assert module.cluster is not None
    return replace(module.cluster, attrs=module.cluster.attrs.updated(**values))


def test_a_limit_of_the_degree_is_kept_by_the_plan_that_answers() -> None:
    module = plan()
    limit = next(question for question in questions(module) if question.title.startswith("No cascade on more than 4"))
    replanned = PASSES.run(limit.change(begin_of(module)))
    assert max(cascade.degree for cascade in replanned.cascades if cascade.phase is Phase.TRAIN) <= 4
    measured = of_times(cluster(gpus=4), {1: 10.0, 4: 4.0, 8: 3.0})
    assert limit.change(measured).cascades[0].attrs["times"] == ((1, Quantity(10.0, "ms")), (4, Quantity(4.0, "ms")))


def test_what_cannot_be_planned_is_said_with_its_reason() -> None:
    module = plan()
    cramped = replace(begin_of(module), cluster=grown(module, memory=Quantity(66.0, "GiB")))
    answers = what_if(cramped, cramped, PASSES, replace(module, cluster=cramped.cluster), 0.0)
    narrow = next(answer for answer in answers if answer.title.startswith("No cascade on more than"))
    assert narrow.iteration_ms is None
    assert "fits no degree" in narrow.refused
    assert any("no plan (" in sentence for sentence in sentences(answers))


def test_the_budget_is_given_to_searches_that_count_time_and_not_to_those_that_count_steps() -> None:
    assert str(with_budget(Pipeline.parse("schedule-z3,place"), 300.0)) == "schedule-z3{budget=300ms},place"
    assert with_budget(PASSES, 300.0) == PASSES


def test_an_answer_is_no_larger_search_than_anybody_would_ask_for() -> None:
    """The pipeline stands in a folder that may come from elsewhere: a billion steps would never end."""
    for asked, held in (
        ("schedule-z3{steps=10000}", "schedule-z3{steps=10000}"),
        ("schedule-z3{steps=10001}", "schedule-z3{budget=300ms}"),
        ("schedule-genetic{generations=61,population=1000000000}", "schedule-genetic"),
        ("schedule-genetic{generations=60,population=39}", "schedule-genetic{population=39}"),
        ("schedule-flexsp{limit=9h}", "schedule-flexsp"),
    ):
        assert str(with_budget(Pipeline.parse(f"{asked},place"), 300.0)) == f"{held},place"


@given(st.floats(1.0, 1e6), st.floats(1.0, 1e6))
def test_a_difference_is_said_the_right_way_round(now: float, then: float) -> None:
    _, said = sentences([Answer("as it is", now), Answer("Changed", then)])
    if abs(then / now - 1) < 0.005:
        assert said.endswith("no difference to speak of.")
    else:
        assert said.endswith("% less." if then < now else "% more.")


def test_begin_of_a_plan_forgets_all_that_was_decided() -> None:
    begin = begin_of(plan())
    assert {name for cascade in begin.cascades for name in cascade.attrs} == set()
    measured = tuple(cascade.with_attrs(per_clip=Quantity(3.0, "ms")) for cascade in plan().cascades)
    begun = begin_of(replace(plan(), cascades=measured))
    assert {name for cascade in begun.cascades for name in cascade.attrs} == {"per_clip"}
    assert quantity(PASSES.run(begin).attrs["area_bound"]) == quantity(plan().attrs["area_bound"])


def test_where_devices_differ_other_degrees_are_those_of_the_devices_a_cascade_has() -> None:
    pod = parse_cluster("1x2:h100-80g+1x2:a100-80g")
    some = begin_of(plan())
    times = tuple((degree, Quantity(100.0 / degree, "ms")) for degree in (1, 2))
    on = replace(some.cascades[1], inputs=(), tokens=1000).with_attrs(times=times)
    both = tuple(replace(on, name=f"c{i}", clips=(i,)) for i in range(2))
    costed = replace(some, cluster=pod, cascades=both, clips=some.clips[:2])
    placed = Pipeline.parse("schedule-static{degree=2},place").run(costed)
    cost = CostModel(placed)
    first, other = placed.cascades
    long = Quantity(cost.time(other, 2, ranks=(2, 3)), "ms")
    slow = other.with_attrs(ranks=(2, 3), start=Quantity(0.0, "ms"), end=long)
    module = lower(replace(placed, cascades=(first, slow), attrs=placed.attrs.updated(makespan=long)))
    degrees = next(section.sentences for section in explain(module) if section.title == "Degrees")
    (sentence,) = [line for line in degrees if line.startswith(f"%{slow.name} ")]
    alone = cost.time(slow, 1, ranks=(2,))
    assert alone > 150
    assert "than on the fastest devices: 50 ms" in sentence
    assert f"At 1 it would take {ms(alone)}, the same GPU time" in sentence
