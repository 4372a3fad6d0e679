"""What combines freely: schedules, replicas, cells, degrees. The gradients of plain PyTorch, to 1e-9 in float64.

The cases cover every pair of choices, and not every product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from arachnec.analysis.uses import overlapped_reduces
from arachnec.executable.folder import read_executable
from arachnec.executable.training_options import Training
from arachnec.ir.nodes import Cascade, Phase, Program
from arachnec.ir.values import Quantity
from arachnec.models.file import load_model_file
from tests.distributed.executor_cases import assert_same_gradients, clip, plain_loop, train_on
from tests.distributed.pipeline_cases import ADAPTED, FROZEN, executable, pipeline_of
from tests.distributed.rank_device import ROUNDING
from tests.slow import SLOW, quick, slow

CLIPS = (clip("a", 3), clip("b", 3), clip("c", 5), clip("d", 2), clip("e", 4))


def partly(cascade: Cascade) -> Cascade:
    """One of a stage's blocks is run again, and tokens are shared unevenly where two ranks share them."""
    if cascade.phase not in (Phase.FORWARD, Phase.BACKWARD):
        return cascade
    shards = (cascade.tokens - 3, 3) if cascade.degree == 2 else None
    return cascade.with_attrs(recompute=1, shards=shards, memory=Quantity(1e-3, "GiB"))  # enough for either


def unalike(cascade: Cascade) -> Cascade:
    """The same, and evenly on the second stage: some ranks get their tokens from two."""
    changed = partly(cascade)
    return changed.with_attrs(shards=None) if cascade.stage.endswith("1") else changed


@dataclass(frozen=True)
class Product:
    stages: str
    schedule: str
    crowded: bool = False  # the optimizer's state is dealt out over a stage's replicas
    cell: int = 1
    host: str = "none"  # what lies in host memory
    policy: str = "single"
    more: str = ""
    trained: tuple[str, ...] | None = None
    change: Callable[[Cascade], Cascade] | None = None
    inside: bool = False  # whether every rank's buckets start inside its last weight


PRODUCTS = {
    "dealt-1f1b": Product("p=2", "schedule=1f1b", crowded=True),
    "dealt-zb-v": Product("p=4", "schedule=zb-v", crowded=True),
    "cells-1f1b": Product("p=2", "schedule=1f1b", cell=2),
    "cells-zb-h1-beside": Product("p=2", "schedule=zb-h1", cell=2, policy="equal-token"),
    "cells-zb-v": Product("p=4", "schedule=zb-v", cell=2),
    "cells-interleaved-recompute": Product("p=4", "schedule=interleaved-1f1b,recompute=true", cell=2),
    "degrees-1-3": Product("p=2", "schedule=zb-h1,degrees=[1,3]"),
    "degrees-2-1-1": Product("p=3", "schedule=1f1b,degrees=[2,1,1]", crowded=True),
    "degrees-3-1-recompute": Product("p=2", "schedule=planned,degrees=[3,1],recompute=true"),
    "cells-frozen-first": Product("p=2", "schedule=zb-h1", cell=2, more=FROZEN, trained=("second",)),
    "cells-adapters": Product("p=2", "schedule=gpipe", cell=2, more=ADAPTED, trained=("first", "second")),
    "cells-partly": Product("p=2", "schedule=kfkb,k=2", cell=2, change=partly),
    "degrees-partly": Product("p=2", "schedule=1f1b,degrees=[2,2]", crowded=True, change=unalike),
    "host-optimizer": Product("p=2", "schedule=1f1b", host="optimizer"),
    "host-zb-h1-alone": Product("p=4", "schedule=zb-h1", host="parameters"),  # a rank a stage
    "host-cells-zb-v": Product("p=4", "schedule=zb-v", cell=2, host="parameters"),
    "host-inputs": Product("p=2", "schedule=1f1b,degree=2,recompute=true", host="inputs"),
    "cells-replicas": Product("p=1", "schedule=gpipe", cell=2),
    "replicas-zb-h1": Product("p=2", "schedule=zb-h1,degree=1", inside=True),
    "replicas-zb-h1-dealt": Product("cuts=[1],replicas=[2,2]", "schedule=zb-h1", crowded=True, inside=True),
    "replicas-planned-host": Product("p=2", "schedule=planned,degree=1", host="optimizer", inside=True),
    "cells-replicas-zb-h1": Product("p=1", "schedule=zb-h1", cell=2, inside=True),
}


QUICK = (
    "dealt-1f1b", "degrees-3-1-recompute", "cells-frozen-first", "cells-partly", "host-inputs", "host-cells-zb-v",
    "replicas-planned-host",
)  # fmt: skip


@pytest.mark.parametrize("product", quick(PRODUCTS, *QUICK))
def test_gradients_are_those_of_plain_pytorch(tmp_path: Path, product: Product) -> None:
    """Five clips of four lengths on four ranks, tied weights across stages; two steps with clipping."""
    training = Training(clip_norm=0.05, lr=0.01)
    passes = pipeline_of(product.stages, product.schedule, product.policy, product.cell, product.host)
    how = {"crowded": product.crowded, "change": product.change, "more": product.more, "trained": product.trained}
    folder = executable(tmp_path / "own", 4, [CLIPS], passes, training=training, **how)  # type: ignore[arg-type]
    module = read_executable(folder).program
    assert any("sharded" in stage.attrs for stage in module.stages) == product.crowded
    if product.inside:
        assert all(starts_inside_a_weight(program) for program in module.programs)
    saved = tmp_path / "g.safetensors"
    planned_anew = product.change is not None  # later iterations are
    steps = train_on(4, folder, save_gradients=saved, steps=1 if planned_anew else 2)["steps"]
    if product.host != "none":
        assert_bytes_crossed(steps[0])
    model = load_model_file(folder / "model.py").build()
    trained = {name for name, value in model.named_parameters() if value.requires_grad}
    loss, gradients = plain_loop(folder, CLIPS)
    norm = float(torch.stack([gradients[name].norm() for name in trained]).norm())
    assert steps[0]["loss"] == pytest.approx(loss, rel=ROUNDING)
    assert steps[0]["gradient_norm"] == pytest.approx(norm, rel=1e-6)
    if not planned_anew:
        loss, gradients = plain_loop(folder, CLIPS, step=1, model=after_one_step(folder, training))
        assert steps[1]["loss"] == pytest.approx(loss, rel=1e-9)
    assert_same_gradients(saved, {name: gradients[name] for name in trained}, 1e-9)


def starts_inside_a_weight(program: Program) -> bool:
    return {program.instructions[at].op for at in overlapped_reduces(program)} == {"weight"}


def assert_bytes_crossed(step: dict[str, Any]) -> None:
    """What came from hosts' memory and went there: more than nothing."""
    assert step["from_host"] > 0 and step["to_host"] > 0


def after_one_step(folder: Path, training: Training) -> nn.Module:
    """The model after torch's own clipping and AdamW."""
    torch.manual_seed(0)
    model = load_model_file(folder / "model.py").build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.lr, betas=(0.9, 0.95), weight_decay=0.01)
    for name, gradient in plain_loop(folder, CLIPS)[1].items():
        model.get_parameter(name).grad = gradient if gradient.any() else None
    torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm)
    optimizer.step()
    optimizer.zero_grad()
    return model


@pytest.mark.parametrize(
    ("before", "after"),
    [
        slow((4, "p=2", "schedule=zb-h1", 2), (2, "p=2", "schedule=1f1b", 1)),
        ((2, "p=2", "schedule=1f1b", 1), (4, "p=1", "schedule=gpipe", 2)),
        slow((4, "p=1", "schedule=gpipe", 4), (4, "p=4", "schedule=zb-v", 2)),
    ],
)
def test_a_checkpoint_goes_on_with_other_stages_cells_and_ranks(
    tmp_path: Path, before: tuple[int, str, str, int], after: tuple[int, str, str, int]
) -> None:
    """One step, then one more elsewhere: the loss of the second of two steps."""
    training = Training(clip_norm=0.05, lr=0.01, ema=0.9)
    folders = []
    for number, (world, stages, schedule, cell) in enumerate((before, after)):
        passes = pipeline_of(stages, schedule, cell=cell)
        folders.append(executable(tmp_path / str(number), world, [CLIPS], passes, training=training))
    train_on(before[0], folders[0], steps=1, checkpoint=tmp_path / "kept")
    resumed = train_on(after[0], folders[1], more=1, checkpoint=tmp_path / "kept", resume=True)
    loss, _ = plain_loop(folders[0], CLIPS, step=1, model=after_one_step(folders[0], training))
    assert resumed["steps"][0]["loss"] == pytest.approx(loss, rel=1e-9)


@SLOW
def test_bf16_with_masters_and_averages_steps_alike_in_other_stages_and_cells(tmp_path: Path) -> None:
    """Three steps, clipped: bf16 parameters are rounded from fp32 masters, on two ranks and on four."""
    training = Training(dtype="bf16", clip_norm=0.05, lr=0.01, ema=0.9)
    curves = []
    for world, schedule, cell in ((2, "schedule=1f1b", 1), (4, "schedule=zb-h1", 2)):
        passes = pipeline_of("p=2", schedule, cell=cell)
        folder = executable(tmp_path / str(world), world, [CLIPS], passes, training=training)
        train_on(world, folder, steps=3)
        steps = msgspec.json.decode((folder / "run.json").read_bytes())["steps"]
        curves.append([step["loss"] for step in steps])
    assert curves[1] == pytest.approx(curves[0], rel=2**-7)  # one rounding of a loss in bf16
    assert curves[0][2] != curves[0][0]
