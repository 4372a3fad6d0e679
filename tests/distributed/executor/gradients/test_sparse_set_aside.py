"""A clip that is set aside teaches the predictors nothing, whatever clips it is batched with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from arachnec.executable.folder import write_executable
from arachnec.executable.training_options import Training
from arachnec.ir.head_density import LayerDensity, density_rows
from arachnec.ir.nodes import Module, Stage
from arachnec.ir.values import Formula, Quantity, Term
from arachnec.models.file import load_model_file
from tests.distributed.executor.gradients.test_set_aside import UNREADABLE
from tests.distributed.executor_cases import ENCODER, MODEL, QUICK, Work, clip, lowered, traced, train_on
from tests.slow import quick

CLIPS = (clip("a", 60), clip("b", 60), clip("c", 25))
SPARSE = (("sparse", (0, 1)),)
BATCHED = (
    Work((0, 1), (0, 1), 0, "vae"),
    Work((2,), (1,), 1, "vae"),
    Work((0, 1), (0, 1), 3, inputs=("c0",), attrs=SPARSE),
    Work((2,), (1,), 4, inputs=("c1",), attrs=SPARSE),
)
ALONE = (
    *(Work((n,), (0,), n, "vae") for n in range(3)),
    *(Work((n,), (0,), 3 + n, inputs=(f"c{n}",), attrs=SPARSE) for n in range(3)),
)


def of_trained(module: Module, **attrs: object) -> Module:
    def changed(stage: Stage) -> Stage:
        return replace(stage, attrs=stage.attrs.updated(**attrs)) if stage.trained else stage  # type: ignore[arg-type]

    return replace(module, stages=tuple(map(changed, module.stages)))


def executable(folder: Path, works: Sequence[Work], world: int, broken: str) -> Path:
    """Clips of these names cannot be read; predictors are right from the first step, and sparse kernels always pay."""
    source = of_trained(
        traced(world, [CLIPS], encoder=True),
        layers=(("blocks.0", 1236), ("blocks.1", 1236)),
        density=density_rows({layer: LayerDensity(0.5, (0.2,) * 3) for layer in range(2)}),
        predictor_rank=4, query_group=16, key_block=1, mass=0.9, division="groups",
        sparse_speed=(1e3, 1e3, 1e3), choice_overhead=Quantity(0.001, "ms"),
    )  # fmt: skip
    squares = Formula((Term(1e-6, (("B", 1), ("S", 2))),), "ms")
    folder.mkdir()
    place = folder / "source.py"
    place.write_text(MODEL + ENCODER + UNREADABLE.format(broken=set(broken)))
    return write_executable(
        folder,
        program=of_trained(lowered(source, works), forward=squares, backward=squares),
        traced=source,
        pipeline=QUICK,
        model_file=load_model_file(place),
        clips=CLIPS,
        training=Training(clip_norm=0.5),
    )


@pytest.mark.parametrize("broken", quick(["b", "ab"], "b"))
def test_plans_that_batch_otherwise_learn_the_same_of_the_other_clips(tmp_path: Path, broken: str) -> None:
    folders = {n: executable(tmp_path / str(n), works, n, broken) for n, works in ((1, ALONE), (2, BATCHED))}
    one, other = (train_on(ranks, folder, steps=3) for ranks, folder in folders.items())
    assert [s["loss"] for s in other["steps"]] == pytest.approx([s["loss"] for s in one["steps"]], rel=1e-5)
    for mine, theirs in zip(one["sparse_layers"], other["sparse_layers"], strict=True):
        assert mine["sparse"] and theirs["sparse"]
        for measured in ("density", "sparsity", "mass", "of_best"):
            assert mine[measured] == pytest.approx(theirs[measured], rel=1e-3)
