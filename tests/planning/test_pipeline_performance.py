"""What `explain` says of a pipeline: its makespan is the plan's, and what is exposed is what free links would save."""

from __future__ import annotations

from dataclasses import replace

import pytest

from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Module, quantity
from arachnec.ir.values import Formula, Quantity, Term
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.views.explain import explain
from arachnec.views.explain_pipeline import module_performance
from tests.distributed.pipeline_cases import pipeline_of
from tests.planning.test_pipeline_plan import module_of

OUTPUT = Formula((Term(1e-6, (("B", 1), ("S", 1))),), "GiB")


def on_links(speed: float) -> Module:
    """Four stages that hand on something, over links of so many GB/s."""
    module = module_of(4, 4, [3] * 8)
    assert module.cluster is not None
    cluster = replace(module.cluster, attrs=module.cluster.attrs.updated(intra=Quantity(speed, "GB/s")))
    stage = module.stages[0]
    stages = (replace(stage, attrs=stage.attrs.updated(cuts=((3, OUTPUT),))),)
    return Pipeline.parse(pipeline_of("p=4", "schedule=1f1b")).run(replace(module, cluster=cluster, stages=stages))


def test_the_model_of_a_plan_has_its_makespan_and_takes_it_apart() -> None:
    free, slow = on_links(1e9), on_links(0.005)
    costs, without = (module_performance(module, CostModel(module)) for module in (slow, free))
    assert costs.makespan == pytest.approx(quantity(slow.attrs["makespan"]), rel=1e-5)
    assert costs.exposed == pytest.approx(costs.makespan - without.makespan, rel=1e-3)
    assert without.exposed == pytest.approx(0.0, abs=1e-3)
    assert costs.compute == pytest.approx(without.compute)
    assert [a + b for a, b in zip(costs.compute, costs.bubble, strict=True)] == pytest.approx([costs.makespan] * 4)
    assert (costs.bottleneck, without.bottleneck) == ("communication", "bubble")


def test_explain_says_what_every_stage_costs_and_what_costs_most() -> None:
    sections = {section.title: section.sentences for section in explain(on_links(0.005))}
    said = sections["The pipeline"]
    assert len(said) == 4 + 2
    assert all(f"@dit_{n}, 1 block on rank {n}: computes " in sentence for n, sentence in enumerate(said[:4]))
    assert said[-1].startswith("What costs most is communication: ")
