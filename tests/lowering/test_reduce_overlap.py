"""All-reduces inside last backwards, where replicas of a stage share the stages before: no rank holds up another."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from arachnec.driver import plan_iteration, plan_model
from arachnec.ir.nodes import Module, Program
from arachnec.passes.infra.pipeline import Pipeline
from tests.distributed.executor_cases import clip
from tests.distributed.pipeline_cases import figures, pipeline_of, traced

LAYERS = 4


def compiled(frames: list[int], cuts: list[int], replicas: list[int], policy: str) -> Module:
    """Lowered, and checked: a stage's every layer has a bucket of its own."""
    module = traced(sum(replicas), [[clip(str(number), count) for number, count in enumerate(frames)]])
    (stage,) = module.stages
    blocks = figures({"Block": [f"blocks.{n}" for n in range(LAYERS)]})
    stage = replace(stage, attrs=stage.attrs.updated(**dict(blocks.pairs), tied_layers=None))
    stages = f"cuts={cuts},replicas={replicas}".replace(" ", "")
    pipeline = Pipeline.parse(pipeline_of(stages, f"schedule=dapple,policy={policy}"))
    model, _ = plan_model(replace(module, stages=(stage,)), pipeline)
    return plan_iteration(model, pipeline, 0)[0]


def starts_inside(program: Program) -> bool:
    return any("early" in step.attrs for step in program.instructions if step.op == "reduce")


def test_a_replica_whose_gradient_another_waits_for_sums_behind_its_backward() -> None:
    """Rank 0 takes what rank 2 hands back before what rank 1 does, which is before rank 1's last backward."""
    module = compiled([60, 25, 40], [1], [1, 2], "A")
    assert [starts_inside(program) for program in module.programs] == [False, True, False]


def test_replicas_that_do_not_wait_for_each_other_sum_inside_their_last_backwards() -> None:
    module = compiled([9, 9], [1], [1, 2], "A")
    assert [starts_inside(program) for program in module.programs] == [False, True, True]


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[int], list[int], list[int], str]:
    stages = draw(st.integers(2, LAYERS))
    cuts = sorted(draw(st.permutations(range(1, LAYERS)))[: stages - 1])
    replicas = draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))
    frames = draw(st.lists(st.integers(1, 60), min_size=1, max_size=9))
    return frames, cuts, replicas, draw(st.sampled_from("AB"))


@settings(max_examples=60, deadline=None)
@given(pipelines())
def test_every_pipeline_with_replicas_passes_check(case: tuple[list[int], list[int], list[int], str]) -> None:
    module = compiled(*case)
    assert {program.rank for program in module.programs} == set(range(sum(case[2])))
