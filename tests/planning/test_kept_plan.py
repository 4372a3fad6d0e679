"""What a run measured of its sparse layers plans anew, and a plan is kept until another is predicted to gain 2 %."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from arachnec.backends.simulator import simulate
from arachnec.backends.torch_distributed.plans.kept_plan import better_plan, have_moved, with_densities
from arachnec.ir.diagnostic import render
from arachnec.ir.head_density import ByLength, latest_densities, sparse_layers
from arachnec.ir.nodes import Module
from arachnec.ir.parser import parse_module
from arachnec.ir.printer import print_module
from arachnec.ir.verify import verify
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.passes.recost import Recost
from arachnec.report import plan_report
from arachnec.views.explain import explain

CASE = (Path(__file__).parents[1] / "golden" / "lower" / "sparse_heads.cascade").read_text()
PIPELINE = Pipeline.parse(CASE.splitlines()[0].split("--passes ")[1])
ASSUMED = {0: (0.5, 0.05, 0.04), 1: (0.2, 0.2, 0.2)}
SPARSE = {0: (0.04, 0.05, 0.5), 1: (0.2, 0.2, 0.2)}


def planned(densities: dict[int, tuple[float, ...]] | None) -> Module:
    return PIPELINE.run(with_densities(parse_module(CASE), None if densities is None else all_lengths(densities)))


def all_lengths(densities: dict[int, tuple[float, ...]]) -> dict[int, ByLength]:
    return {layer: ByLength(heads) for layer, heads in densities.items()}


def test_a_plan_is_kept_where_the_other_gains_less_than_2_percent() -> None:
    first = planned(None)
    near = planned({0: (0.49, 0.05, 0.04), 1: (0.2, 0.21, 0.2)})
    assert near.cascades != first.cascades
    assert better_plan(first, near, None) is first
    sparse = planned(SPARSE)
    assert better_plan(first, sparse, None) is sparse
    assert better_plan(sparse, planned(SPARSE), None) is sparse


def test_the_gain_is_what_the_kept_plan_s_division_costs_with_the_new_densities() -> None:
    first, sparse = planned(None), planned(SPARSE)
    in_use = replace(first, stages=tuple(map(replace, sparse.stages)))
    before, after = (simulate(Recost(None).run(module)).iteration_ms for module in (in_use, sparse))
    assert after < 0.98 * before


def test_layers_that_are_not_sparse_yet_cost_what_dense_ones_do_and_go_on_learning() -> None:
    dense, some = planned({}), planned({1: ASSUMED[1]})
    attributes = [[sparse_layers(cascade) for cascade in module.cascades] for module in (dense, some, planned(None))]
    assert attributes[0] == attributes[1] == attributes[2] and (0, 1) in attributes[0]
    times = [simulate(module).iteration_ms for module in (dense, some, planned(None))]
    assert times[0] > times[1] > times[2]
    without = parse_module("".join(line for line in CASE.splitlines(keepends=True) if "density" not in line))
    alone = Pipeline.parse(str(PIPELINE).replace("degree=2", "degree=1"))  # a dense plan on two ranks may use a ring
    learning = with_densities(parse_module(CASE), {})
    spans = [[c.end - c.start for c in alone.run(module).cascades] for module in (learning, without)]
    assert spans[0] == pytest.approx(spans[1])


def test_measured_densities_are_in_the_text_checked_and_explained() -> None:
    module = planned({1: (0.3, 0.3, 0.3)})
    assert parse_module(print_module(module)) == module
    (stage,) = module.stages
    assert {n: d.heads for n, d in latest_densities(stage).items()} == {0: ASSUMED[0], 1: (0.3, 0.3, 0.3)}
    sentences = next(section.sentences for section in explain(module) if section.title == "Sparse attention")
    assert any(said.startswith("A run measured 1 layer as sparse by then") for said in sentences)
    assert parse_module(print_module(planned({}))) == planned({})
    wrong = CASE.replace("    query_group", "    measured = [[[2], 0.5, [0.5, 0.5, 0.5]]],\n    query_group")
    (problem,) = verify(parse_module(wrong))
    assert "layer 2 in `measured`" in render(problem)


def test_a_plan_is_asked_for_where_a_head_has_moved_or_a_layer_became_sparse() -> None:
    assert have_moved(None, {}) and not have_moved({}, {})
    assumed, sparse = all_lengths(ASSUMED), all_lengths(SPARSE)
    assert have_moved({}, sparse) and have_moved(sparse, {})
    assert not have_moved(assumed, all_lengths({0: (0.505, 0.05, 0.04), 1: ASSUMED[1]}))
    assert have_moved(assumed, all_lengths({0: (0.5, 0.05, 0.042), 1: ASSUMED[1]}))


def test_a_plan_is_asked_for_where_a_class_of_length_was_measured_or_has_moved() -> None:
    before, known = all_lengths(ASSUMED), {0: ByLength(ASSUMED[0], ((16384, ASSUMED[0]),)), 1: ByLength(ASSUMED[1])}
    assert have_moved(before, known) and not have_moved(known, dict(known))
    assert have_moved(known, {**known, 0: ByLength(ASSUMED[0], ((16384, (0.6, 0.05, 0.04)),))})


def test_a_clip_is_planned_by_what_was_measured_of_its_class_of_length() -> None:
    """What was measured of other lengths changes nothing, as long as the clip's own class is known."""
    own = {layer: ((16384, heads),) for layer, heads in SPARSE.items()}
    of_class, others = (
        PIPELINE.run(with_densities(parse_module(CASE), {n: ByLength(x, own[n]) for n, x in every.items()}))
        for every in (SPARSE, ASSUMED)
    )
    assert of_class.cascades == others.cascades == planned(SPARSE).cascades
    assert parse_module(print_module(others)) == others
    sentences = next(section.sentences for section in explain(others) if section.title == "Sparse attention")
    assert "By class of length, means of all heads: 19.8 % from 16384 tokens on." in sentences
    (row,) = plan_report(others, 0.0)["sparse"]
    assert row["predicted_by_class"] == {"16384": pytest.approx(1.19 / 6)}
