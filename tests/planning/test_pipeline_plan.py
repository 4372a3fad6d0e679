"""Stages on ranks: the closed forms of schedules, what is held, who gets which micro-batch, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from arachnec.backends.simulator import simulate
from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Module, Phase, Stage, quantity
from arachnec.ir.values import Attributes, Formula, Quantity, Term
from arachnec.passes.infra.pipeline import Pipeline
from tests.distributed.executor_cases import clip, cluster
from tests.distributed.pipeline_cases import figures, pipeline_of, traced

LINEAR = Formula((Term(1e-6, (("B", 1), ("S", 1))),), "TFLOP")
NOTHING = Formula((), "TFLOP")
FREE = Formula((), "GiB")


def module_of(world: int, layers: int, frames: list[int]) -> Module:
    """Equal layers, nothing outside of them, free transfers: a forward is as long as each half of a backward."""
    traced_module = traced(world, [[clip(number, count) for number, count in enumerate(frames)]])
    attrs = figures({"Block": [f"blocks.{i}" for i in range(layers)]}, FREE)
    attrs = attrs.updated(params=1000 * layers + 108)
    attrs = attrs.updated(block_flops=(LINEAR,), end_flops=(NOTHING, NOTHING), block_attentions=(0,))
    fast = {name: Quantity(0.0, "us") for name in ("latency", "inter_latency")}
    machine = cluster(world)
    return replace(
        traced_module,
        cluster=replace(machine, attrs=machine.attrs.updated(intra=Quantity(1e9, "GB/s"), **fast)),
        stages=(Stage("dit", True, traced_module.stages[0].attrs.updated(**attrs, state=Quantity(0.0, "GiB"))),),
    )


def planned(world: int, layers: int, frames: list[int], stages: str, schedule: str) -> Module:
    return Pipeline.parse(pipeline_of(stages, schedule)).run(module_of(world, layers, frames))


def one_forward(module: Module) -> float:
    """ms of one stage's forward of one micro-batch."""
    return min(c.end - c.start for c in module.cascades if c.phase is Phase.FORWARD)


@pytest.mark.parametrize(("ranks", "rounds"), [(2, 1), (2, 4), (4, 1), (4, 2), (4, 4), (8, 1), (8, 2)])
def test_simulated_makespans_are_the_closed_forms(ranks: int, rounds: int) -> None:
    """F = I = W, m = rounds * p: (m + p - 1) 3F, (v m + p - 1) 3F, and m 3F + (p - 1) F."""
    p, m = ranks, ranks * rounds
    forms = {
        ("gpipe", p): 3 * (m + p - 1),
        ("1f1b", p): 3 * (m + p - 1),
        ("zb-h1", p): 3 * m + p - 1,
        ("interleaved-1f1b", 2 * p): 3 * (2 * m + p - 1),
        ("zb-v", 2 * p): 6 * m + (p - 1 if m >= 2 * p else 2 * (p - 1)),
    }
    for (schedule, stages), units in forms.items():
        module = planned(p, 2 * p, [3] * m, f"p={stages}", f"schedule={schedule}")
        expected = units * one_forward(module)
        assert simulate(module).makespan_ms == pytest.approx(expected, rel=1e-4), schedule


def test_every_micro_batch_goes_through_all_stages_of_one_replica() -> None:
    """Eleven clips of three lengths on two replicas of two stages."""
    module = planned(4, 4, [9, 9, 1, 1, 1, 5, 5, 5, 1, 1, 9], "p=2", "schedule=1f1b")
    ranks: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for cascade in module.cascades:
        if cascade.phase is Phase.FORWARD:
            ranks.setdefault(cascade.clips, []).append(cascade.ranks)
    assert set(map(tuple, ranks.values())) == {((0,), (2,)), ((1,), (3,))}
    assert sorted(clip for clips in ranks for clip in clips) == list(range(11))


def test_state_lies_on_the_ranks_of_its_stage() -> None:
    traced_module = module_of(4, 4, [3] * 4)
    stage = traced_module.stages[0].attrs.updated(state=Quantity(1.0, "GiB"), optimizer=Quantity(0.5, "GiB"))
    module = Pipeline.parse(pipeline_of("p=4", "schedule=1f1b")).run(
        replace(traced_module, stages=(replace(traced_module.stages[0], attrs=stage),))
    )
    states = [program.attrs["state"].value for program in module.programs]  # type: ignore[union-attr]
    tied = 48 + 2 * 12  # parameters that further parts hold
    assert sum(states) == pytest.approx(1 + tied / 4108)
    assert max(states) < 0.3


def test_stages_recompute_as_few_blocks_as_their_micro_batches_need_to_fit() -> None:
    """Less memory, more blocks and a longer step: from none of a stage's four to all."""
    traced_module = module_of(2, 8, [3] * 4)
    whole, kept = (Formula((Term(size, (("B", 1), ("S", 1))),), "GiB") for size in (2e-2, 1e-3))
    attrs = traced_module.stages[0].attrs.updated(
        block_saved=(whole,), block_inputs=(kept,), saved=whole, saved_recompute=kept
    )
    assert traced_module.cluster is not None
    plans = []
    for memory in (2.5, 2.0, 1.4, 1.0, 0.7):
        machine = replace(
            traced_module.cluster, attrs=traced_module.cluster.attrs.updated(memory=Quantity(memory, "GiB"))
        )
        small = replace(traced_module, cluster=machine, stages=(replace(traced_module.stages[0], attrs=attrs),))
        module = Pipeline.parse(pipeline_of("p=2", "schedule=1f1b")).run(small)
        blocks = {CostModel(module).recomputed(cascade) for cascade in module.cascades}
        plans.append((*blocks, quantity(module.attrs["makespan"])))
    assert [blocks for blocks, _ in plans] == [0, 1, 2, 3, 4]
    assert plans == sorted(plans)


@pytest.mark.parametrize(
    ("world", "stages", "schedule", "said"),
    [
        (3, "p=2", "schedule=1f1b", "3 ranks cannot hold pipelines of 2 ranks evenly"),
        (2, "p=3", "schedule=zb-v", "`zb-v` puts 2 stages on every rank, and the model has 3"),
        (4, "p=2", "schedule=1f1b,degree=3", "degree 3 does not divide the 2 ranks of each stage"),
        (2, "p=5", "schedule=1f1b", "`stages{p=5}` of @dit, which has 4 blocks"),
        (2, "p=0", "schedule=1f1b", "`stages{p=0}` of @dit, which has 4 blocks"),
        (2, "cuts=[2,1]", "schedule=1f1b", "the cuts [2, 1] of @dit are not in order: 1 stands behind 2"),
        (2, "cuts=[4]", "schedule=1f1b", "cut 4 of @dit leaves a stage without blocks"),
        (2, "p=3,cuts=[1]", "schedule=1f1b", "1 cuts make 2 stages, and p is 3"),
    ],
)
def test_what_cannot_be_is_refused_with_a_remedy(world: int, stages: str, schedule: str, said: str) -> None:
    with pytest.raises(UserError) as refusal:
        planned(world, 4, [3] * 4, stages, schedule)
    diagnostic = refusal.value.diagnostics[0]
    assert said in diagnostic.message
    assert diagnostic.text(diagnostic.help)


def test_a_pipeline_runs_at_degrees_that_its_stage_lists() -> None:
    """Two ranks of each stage could run one micro-batch. `explain` asks what narrower cascades would cost."""
    traced_module = module_of(4, 4, [3] * 4)
    listing = replace(traced_module.stages[0], attrs=traced_module.stages[0].attrs.updated(degrees=(1,)))
    narrow = replace(traced_module, stages=(listing,))
    module = Pipeline.parse(pipeline_of("p=2", "schedule=1f1b")).run(narrow)
    assert {cascade.degree for cascade in module.cascades} == {1}
    for option in ("degree=2", "degrees=[2,2]"):
        with pytest.raises(UserError, match="a micro-batch cannot run on 2 ranks of @dit"):
            Pipeline.parse(pipeline_of("p=2", f"schedule=1f1b,{option}")).run(narrow)


def test_a_stage_without_figures_is_refused() -> None:
    traced_module = module_of(2, 4, [3])
    bare = Stage("dit", True, Attributes.of(params=1, layers=traced_module.stages[0].attrs["layers"]))
    with pytest.raises(UserError, match="cannot be cut"):
        Pipeline.parse("stages{p=2}").run(replace(traced_module, stages=(bare,)))


def test_cells_and_optimizers_are_of_the_ranks_that_a_file_of_orders_gives_a_stage(tmp_path: Path) -> None:
    """Three stages on two ranks, so each stage has half of all ranks."""
    file = tmp_path / "orders.csv"
    file.write_text("0F0,0F1,2F0,2B0,2F1,2B1,0B0,0B1\n1F0,1F1,1B0,1B1\n")
    passes = pipeline_of("cuts=[1,2]", f'orders="{file}"', cell="world")
    module = Pipeline.parse(passes).run(traced(4, [[clip("a", 3), clip("b", 3)]]))
    assert [stage.attrs["cell"] for stage in module.stages] == [2, 2, 2]
    assert {cascade.ranks for cascade in module.cascades if cascade.stage == "dit_1"} == {(2, 3)}
    crowded = traced(4, [[clip("a", 3), clip("b", 3)] * 2])
    large = crowded.stages[0].attrs.updated(state=Quantity(6.0, "GiB"), optimizer=Quantity(4.0, "GiB"))
    crowded = replace(crowded, stages=(replace(crowded.stages[0], attrs=large),))
    module = Pipeline.parse(pipeline_of("cuts=[1,2]", f'orders="{file}"')).run(crowded)
    assert [stage.attrs["sharded"] for stage in module.stages] == [2, 2, 2]


def test_the_fullest_rank_of_a_file_of_orders_decides_whether_the_optimizer_is_dealt_out(tmp_path: Path) -> None:
    """Three of four stages on one rank take more than half of a device, where two would not."""
    file = tmp_path / "orders.csv"
    file.write_text("0F0,2F0,3F0,3B0,2B0,0B0\n1F0,1B0\n")
    module = traced(4, [[clip("a", 3), clip("b", 3)]])
    assert module.cluster is not None
    memory = module.cluster.memory
    state = module.stages[0].attrs.updated(state=Quantity(0.8 * memory, "GiB"), optimizer=Quantity(0.4 * memory, "GiB"))
    module = replace(module, stages=(replace(module.stages[0], attrs=state),))
    module = Pipeline.parse(pipeline_of("cuts=[1,2,3]", f'orders="{file}"')).run(module)
    assert [stage.attrs.get("sharded") for stage in module.stages] == [2, 2, 2, 2]


def test_degrees_say_how_many_ranks_hold_a_stage_beside_a_file_of_orders(tmp_path: Path) -> None:
    file = tmp_path / "orders.csv"
    file.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    passes = pipeline_of("p=2", f'orders="{file}",degrees=[1,3]', cell="world")
    module = Pipeline.parse(passes).run(traced(4, [[clip("a", 3), clip("b", 3)]]))
    assert [stage.attrs.get("cell", 1) for stage in module.stages] == [1, 1]
    assert sorted({cascade.degree for cascade in module.cascades}) == [1, 3]


def test_a_clip_with_fewer_tokens_than_a_cell_has_ranks_is_told_so() -> None:
    with pytest.raises(UserError, match=r"clip 0 \(1 tokens, stage `@dit_0`\) cannot be divided over the 2 ranks"):
        Pipeline.parse(pipeline_of("p=2", "schedule=1f1b", cell=2)).run(traced(4, [[clip("a", 1, 8, 8)]]))
