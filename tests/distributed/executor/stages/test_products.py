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

from arachnec.executable.folder import read_executable
from arachnec.executable.training_options import Training
from arachnec.ir.nodes import Cascade, Phase
from arachnec.ir.values import Quantity
from arachnec.models.batch import clip_generator
from arachnec.models.file import load_model_file
from tests.distributed.executor.stages.test_pipelines import FROZEN, assert_exact
from tests.distributed.executor_cases import clip, plain_loop, train_on
from tests.distributed.pipeline_cases import executable, pipeline_of

CLIPS = (clip("a", 3), clip("b", 3), clip("c", 5), clip("d", 2), clip("e", 4))


ADAPTED = """

def build():
    model = Hard().double()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".out." in name)
    return model
"""


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
    "host-zb-h1": Product("p=2", "schedule=zb-h1", host="parameters"),
    "host-cells-zb-v": Product("p=4", "schedule=zb-v", cell=2, host="parameters"),
    "host-inputs": Product("p=2", "schedule=1f1b,degree=2,recompute=true", host="inputs"),
    "cells-replicas": Product("p=1", "schedule=gpipe", cell=2),
}


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_gradients_are_those_of_plain_pytorch(tmp_path: Path, product: Product) -> None:
    """Five clips of four lengths on four ranks, tied weights across stages; then two steps with clipping."""
    training = Training(clip_norm=0.05, lr=0.01)
    passes = pipeline_of(product.stages, product.schedule, product.policy, product.cell, product.host)
    how = {"crowded": product.crowded, "change": product.change, "more": product.more, "trained": product.trained}
    folder = executable(tmp_path / "own", 4, [CLIPS], passes, training=training, **how)  # type: ignore[arg-type]
    module = read_executable(folder).program
    assert any("sharded" in stage.attrs for stage in module.stages) == product.crowded
    saved = tmp_path / "g.safetensors"
    report = train_on(4, folder, save_gradients=saved, steps=1)
    if product.host != "none":
        assert_bytes_crossed(folder, report["steps"][0])
    loss, gradients = plain_loop(folder, CLIPS)
    trained = {
        name for name, value in load_model_file(folder / "model.py").build().named_parameters() if value.requires_grad
    }
    expected = {name: value for name, value in gradients.items() if name in trained}
    assert_exact(saved, expected)
    if product.change is not None:  # later iterations are planned anew
        return
    train_on(4, folder, steps=2)
    steps = msgspec.json.decode((folder / "run.json").read_bytes())["steps"]
    norm = float(torch.stack([value.norm() for value in expected.values()]).norm())
    assert steps[0]["loss"] == pytest.approx(loss, rel=1e-12)
    assert steps[0]["gradient_norm"] == pytest.approx(norm, rel=1e-6)
    assert steps[1]["loss"] == pytest.approx(after_one_step(folder, training), rel=1e-9)


def assert_bytes_crossed(folder: Path, step: dict[str, Any]) -> None:
    """What came from hosts' memory and went there: more than nothing."""
    assert step["from_host"] > 0 and step["to_host"] > 0


def after_one_step(folder: Path, training: Training) -> float:
    """The loss of the second step, by torch's own clipping and AdamW."""
    model_file = load_model_file(folder / "model.py")
    torch.manual_seed(0)
    model = model_file.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.lr, betas=(0.9, 0.95), weight_decay=0.01)
    for name, gradient in plain_loop(folder, CLIPS)[1].items():
        model.get_parameter(name).grad = gradient if gradient.any() else None
    torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm)
    optimizer.step()
    total = 0.0
    for clip_made in CLIPS:
        arguments, target = model_file.sample(clip_made, clip_generator(0, 1, clip_made.id))
        with torch.no_grad():
            total += float(model_file.loss(model(**arguments), target)) / len(CLIPS)
    return total


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((4, "p=2", "schedule=zb-h1", 2), (2, "p=2", "schedule=1f1b", 1)),
        ((2, "p=2", "schedule=1f1b", 1), (4, "p=1", "schedule=gpipe", 2)),
        ((4, "p=1", "schedule=gpipe", 4), (4, "p=4", "schedule=zb-v", 2)),
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
    resumed = train_on(after[0], folders[1], steps=1, checkpoint=tmp_path / "kept", resume=True)
    assert resumed["steps"][0]["loss"] == pytest.approx(after_one_step(folders[0], training), rel=1e-9)


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
    assert curves[1] == pytest.approx(curves[0], rel=5e-3)
    assert curves[0][2] != curves[0][0]
