"""Every named pipeline trains for real: what `compare` sets beside each other gives the same losses and gradients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

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
    clip,
    losses,
    plain_loop,
    traced,
    train_on,
)
from tests.distributed.pipeline_cases import figures
from tests.slow import quick

RANKS = 3
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


# What is held here does not depend on how good a plan is.
PASSES = {
    name: passes.replace("schedule-z3", "schedule-z3{steps=20}")
    for name, passes in PIPELINES.items()
    if name not in CHANGES_NUMERICS
}


def trained(place: Path, name: str) -> Path:
    """The executable of one pipeline, trained for two steps."""
    source = place / "source.py"
    source.write_text(MODEL + ENCODER)
    module, pipeline = front_end(), Pipeline.parse(PASSES[name])
    model = pipeline.run_model_part(module)
    folder = write_executable(
        place / name,
        program=pipeline.run_iteration_part(iteration_of(model, 0)),
        traced=module,
        model=model,
        pipeline=PASSES[name],
        model_file=load_model_file(source),
        clips=CLIPS,
        training=Training(lr=0.0),
    )
    train_on(RANKS, folder, steps=2, save_gradients=folder / "g.safetensors")
    return folder


@pytest.mark.parametrize(
    "name", quick(list(PASSES), "default", "fused", "fsdp-hybrid", "flexsp", "megatron-dynamic-cp", "dapple", "adaptis")
)
def test_every_named_pipeline_trains_as_one_process_does(name: str, tmp_path: Path) -> None:
    folder = trained(tmp_path, name)
    program = read_executable(folder).program
    last = [stage.name for stage in program.stages if stage.trained][-1]
    trains = {(last, Phase.TRAIN), (last, Phase.FORWARD)}  # a pipeline trains what goes through its last stage
    works = [cascade for cascade in program.cascades if (cascade.stage, cascade.phase) in trains]
    encoded = {clip for cascade in program.cascades if cascade.phase is Phase.ENCODE for clip in cascade.clips}
    assert sorted(clip for cascade in works for clip in cascade.clips) == sorted(encoded) == list(range(len(CLIPS)))
    if not any("part_of" in stage.attrs for stage in program.stages):  # stages share a clip by blocks
        assert max(cascade.degree for cascade in works) > 1
    losses_run = losses(folder / "run.json")
    assert len(losses_run) == 2
    for step in range(2):
        loss, gradients = plain_loop(folder, CLIPS, step=step)
        assert abs(losses_run[step] - loss) <= 1e-6 * abs(loss)
    assert_same_gradients(folder / "g.safetensors", gradients)
