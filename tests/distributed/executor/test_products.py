"""What combines freely: schedules, replicas, cells, degrees. The gradients of plain PyTorch, to 1e-9 in float64.

The cases cover every pair of choices, and not every product.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch

from arachnec.executable.folder import read_executable
from arachnec.executable.training_options import Training
from arachnec.models.batch import clip_generator
from arachnec.models.file import load_model_file
from tests.distributed.executor.test_pipelines import assert_exact
from tests.distributed.executor_cases import clip, plain_loop, train_on
from tests.distributed.pipeline_cases import executable, pipeline_of

CLIPS = (clip("a", 3), clip("b", 3), clip("c", 5), clip("d", 2), clip("e", 4))


@dataclass(frozen=True)
class Product:
    stages: str
    schedule: str
    crowded: bool = False  # the optimizer's state is dealt out over a stage's replicas
    cell: int = 1
    policy: str = "single"


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
    "cells-replicas": Product("p=1", "schedule=gpipe", cell=2),
}


@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
def test_gradients_are_those_of_plain_pytorch(tmp_path: Path, product: Product) -> None:
    """Five clips of four lengths on four ranks, tied weights across stages; then two steps with clipping."""
    training = Training(clip_norm=0.05, lr=0.01)
    passes = pipeline_of(product.stages, product.schedule, product.policy, product.cell)
    folder = executable(tmp_path / "own", 4, [CLIPS], passes, training=training, crowded=product.crowded)
    module = read_executable(folder).program
    assert any("sharded" in stage.attrs for stage in module.stages) == product.crowded
    saved = tmp_path / "g.safetensors"
    train_on(4, folder, save_gradients=saved, steps=1)
    loss, expected = plain_loop(folder, CLIPS)
    assert_exact(saved, expected)
    train_on(4, folder, steps=2)
    steps = msgspec.json.decode((folder / "run.json").read_bytes())["steps"]
    norm = float(torch.stack([value.norm() for value in expected.values()]).norm())
    assert steps[0]["loss"] == pytest.approx(loss, rel=1e-12)
    assert steps[0]["gradient_norm"] == pytest.approx(norm, rel=1e-6)
    assert steps[1]["loss"] == pytest.approx(after_one_step(folder, training), rel=1e-9)


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
    for each in CLIPS:
        arguments, target = model_file.sample(each, clip_generator(0, 1, each.id))
        with torch.no_grad():
            total += float(model_file.loss(model(**arguments), target)) / len(CLIPS)
    return total
