"""Every named pipeline trains for real: what `compare` sets beside each other gives the same losses and gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from arachnec.backends.torch_distributed.engine import train
from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.executable.folder import iteration_of, read_executable, write_executable
from arachnec.executable.training_options import Training
from arachnec.ir.nodes import Module, Phase
from arachnec.ir.values import Formula, Quantity, Term
from arachnec.models.file import load_model_file
from arachnec.passes.infra.named_pipelines import CHANGES_NUMERICS, PIPELINES
from arachnec.passes.infra.pipeline import Pipeline
from tests.distributed.executor_cases import (
    ENCODER,
    MODEL,
    assert_same_gradients,
    captured_once,
    clip,
    losses,
    plain_loop,
    traced,
)
from tests.distributed.harness import run_ranks
from tests.distributed.pipeline_cases import figures

RANKS = 3
EXACT = tuple(name for name in PIPELINES if name not in CHANGES_NUMERICS)
CLIPS = (
    clip("long", 60),
    clip("wide", 3, width=40),
    clip("a", 5),
    clip("b", 5, start=1),
    clip("image", 1),
    clip("c", 8),
)
SLOW = Quantity(2e-9, "TFLOP/s")  # so that sharing a clip pays beside any latency
SMALL = Quantity(1.4e-3 / 0.94, "GiB")  # so that one rank does not hold the long clip


def front_end() -> Module:
    """Encoder and transformer on a cluster that makes every pipeline share the long clip."""
    module = traced(RANKS, [CLIPS], encoder=True)
    assert module.cluster is not None
    vae, dit = module.stages
    handed = Formula((Term(1e-8, (("B", 1), ("S", 1))),), "GiB")
    return replace(
        module,
        cluster=replace(module.cluster, attrs=module.cluster.attrs.updated(flops=SLOW, memory=SMALL)),
        stages=(
            replace(vae, attrs=vae.attrs.updated(output=handed)),
            replace(dit, attrs=dit.attrs.updated(**figures({"Block": ("blocks.0", "blocks.1")}, handed))),
        ),
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for every pipeline, all trained for two steps on the same ranks."""
    place = tmp_path_factory.mktemp("baselines")
    source = place / "source.py"
    source.write_text(MODEL + ENCODER)
    module = front_end()
    for name in EXACT:
        pipeline = Pipeline.parse(name)
        model = pipeline.run_model_part(module)
        write_executable(
            place / name,
            program=pipeline.run_iteration_part(iteration_of(model, 0)),
            traced=module,
            model=model,
            pipeline=name,
            model_file=load_model_file(source),
            clips=CLIPS,
            training=Training(lr=0.0),
        )
    run_ranks(RANKS, train_all, place, timeout=240)
    return place


def train_all(place: Path) -> None:
    """On every rank: each executable of the folder."""
    with captured_once():
        for name in EXACT:
            options = RunOptions(steps=2, save_gradients=place / name / "g.safetensors")
            train(read_executable(place / name), options, torch.device("cpu"))


@pytest.mark.parametrize("name", EXACT)
def test_every_named_pipeline_trains_as_one_process_does(name: str, trained: Path) -> None:
    program = read_executable(trained / name).program
    last = [stage.name for stage in program.stages if stage.trained][-1]
    trains = {(last, Phase.TRAIN), (last, Phase.FORWARD)}  # a pipeline trains what goes through its last stage
    works = [cascade for cascade in program.cascades if (cascade.stage, cascade.phase) in trains]
    encoded = {clip for cascade in program.cascades if cascade.phase is Phase.ENCODE for clip in cascade.clips}
    assert sorted(clip for cascade in works for clip in cascade.clips) == sorted(encoded) == list(range(len(CLIPS)))
    if not any("part_of" in stage.attrs for stage in program.stages):  # stages share a clip by blocks
        assert max(cascade.degree for cascade in works) > 1
    found = losses(trained / name / "run.json")
    assert len(found) == 2
    for step in range(2):
        loss, gradients = plain_loop(trained / name, CLIPS, step=step)
        assert abs(found[step] - loss) <= 1e-6 * abs(loss)
    assert_same_gradients(trained / name / "g.safetensors", gradients)
