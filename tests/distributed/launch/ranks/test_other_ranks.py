"""A pipeline with a fixed number of stages goes on where fewer ranks are left, with as many stages as fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from arachnec.backends.torch_distributed.plans.background_planner import on_other_ranks
from arachnec.backends.torch_distributed.plans.stage_counts import says_other_stages
from arachnec.executable.training_options import Training
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.passes.shard_parameters import ShardParameters
from tests.distributed.executor_cases import clip, cluster, train_on
from tests.distributed.pipeline_cases import executable, pipeline_of, planned
from tests.slow import slow

CLIPS = [clip("a", 1), clip("b", 2), clip("c", 1), clip("d", 3)]
ENDS = "lower,check"


@pytest.mark.parametrize(
    ("stages", "schedule", "world", "expected"),
    [
        ("stages{p=2}", "schedule-pipeline", 1, ("stages{p=1}", "schedule-pipeline")),
        ("stages{p=2}", "schedule-pipeline", 6, ("stages{p=2}", "schedule-pipeline")),
        ("stages{p=4}", "schedule-pipeline", 2, ("stages{p=2}", "schedule-pipeline")),
        ("stages{p=4}", "schedule-pipeline", 6, ("stages{p=3}", "schedule-pipeline")),
        ("stages{p=4}", "schedule-pipeline", 5, ("stages{p=1}", "schedule-pipeline")),
        ("stages{cuts=[1,2,3]}", "schedule-pipeline", 8, ("stages{cuts=[1,2,3]}", "schedule-pipeline")),
        ("stages{cuts=[1,2,3]}", "schedule-pipeline", 2, ("stages{p=2}", "schedule-pipeline")),
        ("stages{p=2,replicas=[3,1]}", "schedule-pipeline", 2, ("stages{p=2}", "schedule-pipeline")),
        (
            "stages{p=4}",
            "schedule-pipeline{schedule=interleaved-1f1b}",
            1,
            ("stages{p=2}", "schedule-pipeline{schedule=interleaved-1f1b}"),
        ),
        ("stages{p=4}", "schedule-pipeline{schedule=zb-v}", 2, ("stages{p=4}", "schedule-pipeline{schedule=zb-v}")),
        ("stages{p=2}", "schedule-pipeline{degree=2}", 4, ("stages{p=2}", "schedule-pipeline{degree=2}")),
        ("stages{p=2}", "schedule-pipeline{degree=2}", 2, ("stages{p=2}", "schedule-pipeline")),
        ("stages{p=2}", "schedule-pipeline{degrees=[1,3]}", 2, ("stages{p=2}", "schedule-pipeline")),
        ("stages{p=4}", "schedule-pipeline{orders=a.csv}", 2, ("stages{p=2}", "schedule-pipeline")),
        ("stages{p=2}", "schedule-pipeline{orders=a.csv}", 4, ("stages{p=2}", "schedule-pipeline")),
        ("stages", "schedule-pipeline", 1, ("stages", "schedule-pipeline")),
        ("choose-layout", "schedule-z3", 1, ("choose-layout", "schedule-z3")),
        ("choose-layout", "schedule-static{degree=4}", 2, ("choose-layout", "schedule-static{degree=2}")),
        ("choose-layout", "schedule-static{degree=2}", 4, ("choose-layout", "schedule-static{degree=2}")),
        ("choose-layout", "schedule-same-bucket{degree=4}", 3, ("choose-layout", "schedule-same-bucket{degree=3}")),
    ],
)
def test_stages_are_as_many_as_fit_and_the_rest_of_the_pipeline_stays(
    stages: str, schedule: str, world: int, expected: tuple[str, str]
) -> None:
    before, after = (
        Pipeline.parse(f"{one},partition{{policy=dual}},annotate,{other},{ENDS}")
        for one, other in ((stages, schedule), expected)
    )
    assert str(on_other_ranks(before, cluster(world))) == str(after)


@pytest.mark.parametrize(
    ("stages", "cell", "world", "expected"),
    [
        ("p=2", "4", 8, "4"),
        ("p=2", "4", 4, "2"),
        ("p=2", "4", 1, "1"),
        ("p=2", "3", 8, "2"),
        ("p=2", "world", 2, "world"),
    ],
)
def test_a_cell_of_so_many_ranks_is_the_largest_that_a_stage_has_room_for(
    stages: str, cell: str, world: int, expected: str
) -> None:
    pipeline = Pipeline.parse(f"stages{{{stages}}},shard-parameters{{cell={cell}}},partition,annotate,{ENDS}")
    (fitted,) = (step for step in on_other_ranks(pipeline, cluster(world)).passes if isinstance(step, ShardParameters))
    assert fitted.cell == expected
    alone = Pipeline.parse(f"shard-parameters{{cell={cell}}},partition,annotate,schedule-z3,place,{ENDS}")
    (fitted,) = (step for step in on_other_ranks(alone, cluster(2)).passes if isinstance(step, ShardParameters))
    assert fitted.cell == ("world" if cell == "world" else "2")


@pytest.mark.parametrize(
    ("before", "after", "stages", "schedule", "cell"),
    [
        (2, 1, "p=2", "schedule=1f1b", 1),
        slow(4, 2, "p=4", "schedule=1f1b", 1),
        slow(4, 2, "p=2,replicas=[1,3]", "schedule=dapple", 1),
        slow(2, 1, "p=4", "schedule=interleaved-1f1b", 1),
        slow(4, 2, "p=2", "schedule=1f1b,degree=2", 2),
    ],
)
def test_the_losses_on_fewer_ranks_are_those_of_the_whole_pipeline(
    before: int, after: int, stages: str, schedule: str, cell: int, tmp_path: Path
) -> None:
    """Two steps, then two on the ranks that are left, by the same executable: those of four steps undisturbed."""
    passes = pipeline_of(stages, schedule, cell=cell)
    folder = executable(tmp_path / "build", before, [CLIPS], passes, training=Training(lr=0.01, clip_norm=0.0))
    kept = tmp_path / "kept"
    train_on(before, folder, steps=2, checkpoint=kept)
    resumed = train_on(after, folder, more=2, checkpoint=kept, resume=True)
    through = train_on(before, folder, steps=4)
    for ours, plain in zip(resumed["steps"], through["steps"][2:], strict=True):
        assert ours["loss"] == pytest.approx(plain["loss"], rel=1e-9)


def test_another_number_of_stages_is_told_and_the_same_is_not() -> None:
    two, one = (planned(world, CLIPS, pipeline_of(f"p={world}", "schedule=1f1b")) for world in (2, 1))
    assert says_other_stages(two, one) == "compiled as 2 stages for 2 ranks, run as 1 stage on 1 rank"
    assert says_other_stages(two, two) is None
