"""Whole training steps with their collectives over NCCL's semantics, and their handoffs over gloo.

The device is late as well: what is copied to it or from it is no number until the copy is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from arachnec.analysis.uses import overlapped_reduces
from arachnec.backends.torch_distributed import engine
from arachnec.backends.torch_distributed.executor import interpreter
from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.executable.folder import read_executable, write_executable
from arachnec.executable.training_options import Training
from arachnec.ir.nodes import Instruction, Level, Module
from arachnec.lowering.programs import lower
from arachnec.models.file import load_model_file
from arachnec.passes.check import find_problems
from arachnec.runtime.device_runtime import DeviceRuntime
from tests.distributed.executor_cases import (
    ENCODER,
    MODEL,
    Work,
    as_planned,
    assert_same_gradients,
    captured_once,
    clip,
    losses,
    lowered,
    plain_loop,
    traced,
    train_on,
)
from tests.distributed.harness import RankError, run_ranks
from tests.distributed.late_device import late_runtime
from tests.distributed.ncclish import NAME, Counts, Settings, install, uninstall
from tests.slow import slow

LAYERS = (("blocks.0", 1000), ("blocks.1", 1000))
CLIPS = [clip(name, frames) for name, frames in zip("abcdefg", (2, 2, 3, 3, 3, 5, 4), strict=True)]
ULYSSES, RING = (("ulysses", 2), ("ring", 1)), (("ulysses", 1), ("ring", 2))
PLANS = {  # ranks to encoders on one rank and on two, values that cross, all grids, ranks that end at different times
    2: [
        Work((0, 1), (0, 1), 0, "vae"),
        Work((2, 3), (0,), 1, "vae"),
        Work((4,), (1,), 1, "vae"),
        Work((5,), (0,), 2, "vae"),
        Work((6,), (1,), 2, "vae"),
        Work((0, 1), (0, 1), 3, inputs=("c0",), attrs=RING),
        Work((2,), (1,), 4, inputs=("c1",)),
        Work((4,), (0,), 4, inputs=("c2",)),
        Work((3,), (1,), 5, inputs=("c1",)),
        Work((5,), (0, 1), 6, inputs=("c3",), attrs=ULYSSES),
        Work((6,), (0, 1), 7, inputs=("c4",), attrs=(*RING, ("recompute", True))),
    ],
    3: [
        Work((0, 1), (0, 2), 0, "vae"),
        Work((2,), (1,), 0, "vae"),
        Work((3, 4), (1,), 1, "vae"),
        Work((5,), (2,), 1, "vae"),
        Work((6,), (0,), 1, "vae"),
        Work((0, 1), (1, 2), 3, inputs=("c0",), attrs=ULYSSES),
        Work((2,), (0,), 3, inputs=("c1",)),
        Work((5,), (2, 0), 4, inputs=("c3",), attrs=RING),
        Work((3,), (1,), 4, inputs=("c2",)),
        Work((4,), (1,), 5, inputs=("c2",)),
        Work((6,), (0, 1, 2), 6, inputs=("c4",), attrs=(("ulysses", 1), ("ring", 3))),
    ],
    4: [
        Work((0, 1), (0, 3), 0, "vae"),
        Work((2,), (1,), 0, "vae"),
        Work((3, 4), (2,), 0, "vae"),
        Work((5,), (1,), 1, "vae"),
        Work((6,), (3,), 1, "vae"),
        Work((5,), (0, 1, 2, 3), 3, inputs=("c3",), attrs=(("ulysses", 2), ("ring", 2))),
        Work((0, 1), (2, 1), 4, inputs=("c0",), attrs=RING),
        Work((6,), (0, 3), 4, inputs=("c4",), attrs=ULYSSES),
        Work((2,), (0,), 5, inputs=("c1",)),
        Work((3,), (1,), 5, inputs=("c2",)),
        Work((4,), (2, 3), 6, inputs=("c2",), attrs=(*ULYSSES, ("recompute", True))),
    ],
}


def planned(world: int, **attrs: Any) -> Module:
    """Gradients in buckets, the first of them beside the last backwards, and the optimizer dealt out."""
    module = lowered(traced(world, [CLIPS], encoder=True), PLANS[world])
    attrs = {"layers": LAYERS, "sharded": world, **attrs}
    stages = tuple(
        replace(stage, attrs=stage.attrs.updated(**attrs)) if stage.trained else stage for stage in module.stages
    )
    cut = tuple(replace(node, attrs=node.attrs.updated(buckets=(1, 1))) for node in module.reductions)
    return lower(replace(module, stages=stages, reductions=cut, programs=(), level=Level.PLACED))


def written(folder: Path, module: Module, training: Training | None = None) -> Path:
    assert not find_problems(module)
    assert all(overlapped_reduces(program) for program in module.programs)
    folder.mkdir()
    source = folder / "source.py"
    source.write_text(MODEL + ENCODER)
    model = traced(len(module.programs), [CLIPS], encoder=True)
    return write_executable(
        folder, program=module, traced=model, model=as_planned(model, module), pipeline="default",
        model_file=load_model_file(source), clips=CLIPS, training=training,
    )  # fmt: skip


@contextmanager
def ncclish_world(folder: Path, settings: Settings) -> Iterator[Counts]:
    """The default process group has NCCL's semantics inside, and is a new one of gloo afterwards.

    Where something fails inside nothing is made again: the ranks end.
    """
    rank, world = dist.get_rank(), dist.get_world_size()

    def store(name: str) -> dist.Store:
        return dist.FileStore(str(folder / name), world)

    dist.destroy_process_group()
    counts = install(store("watch"), rank, world, settings)
    dist.init_process_group(NAME, store=store("world"), rank=rank, world_size=world)
    yield counts
    dist.barrier()
    dist.destroy_process_group()
    uninstall()
    dist.init_process_group("gloo", store=store("after"), rank=rank, world_size=world)


def train_ncclish(folder: Path, options: RunOptions, settings: Settings) -> Counts:
    late = late_runtime()
    with captured_once(), pytest.MonkeyPatch.context() as patch, ncclish_world(folder, settings) as counts:
        patch.setattr(DeviceRuntime, "of", classmethod(lambda cls, device: late))
        engine.train(read_executable(folder), options, torch.device("cpu"))
        return counts


def assert_clean(ranks: Sequence[Counts], settings: Settings) -> None:
    for counts in ranks:
        assert not counts.freed_in_flight
        assert not counts.written_in_flight
        assert counts.operations > 50
        assert counts.pairs == 0
        assert counts.communicators <= 8
        if settings.eager:
            assert counts.connected_in_use == 0


@pytest.mark.parametrize(
    ("world", "eager", "kernels"),
    [
        slow(2, True, 32),
        slow(2, True, 1),
        slow(2, False, 32),
        (2, False, 1),
        slow(3, True, 32),
        slow(3, True, 1),
        (3, False, 32),
        slow(3, False, 1),
        (4, True, 32),
        slow(4, True, 1),
        slow(4, False, 32),
        slow(4, False, 1),
    ],
)
def test_a_step_has_the_gradients_of_a_plain_loop(tmp_path: Path, world: int, eager: bool, kernels: int) -> None:
    folder, saved = written(tmp_path / "run", planned(world)), tmp_path / "gradients.safetensors"
    settings = Settings(eager=eager, kernels=kernels, delay=2e-3)
    assert_clean(run_ranks(world, train_ncclish, folder, RunOptions(save_gradients=saved), settings), settings)
    loss, gradients = plain_loop(folder, CLIPS)
    assert_same_gradients(saved, gradients)
    assert losses(folder / "run.json") == pytest.approx([loss], rel=1e-6)


def test_several_steps_go_the_way_they_go_over_gloo(tmp_path: Path) -> None:
    """The next step's encoders beside gradients on their way, parameters from their owners, clipping, in bf16."""
    module, settings = planned(4, gradients="bf16", dtype="bf16"), Settings(kernels=2, delay=1e-3)
    training = Training(lr=1e-2, clip_norm=0.1)
    here, gloo = (written(tmp_path / name, module, training) for name in ("here", "gloo"))
    assert_clean(run_ranks(4, train_ncclish, here, RunOptions(steps=2, dtype="bf16"), settings), settings)
    train_on(4, gloo, steps=2, dtype="bf16")
    assert losses(here / "run.json") == pytest.approx(losses(gloo / "run.json"), rel=1e-6)


def test_collectives_that_cross_a_cascade_would_stand_still(tmp_path: Path) -> None:
    """The same run where ranks 0 and 1 meet in one order and issue in another: what the others would be blind to."""
    folder = written(tmp_path / "run", planned(2))
    with pytest.raises(RankError, match="nothing moves any more"):
        run_ranks(2, train_crossed, folder, RunOptions(), Settings(kernels=1))


def train_crossed(folder: Path, options: RunOptions, settings: Settings) -> Counts:
    """Rank 0 all-reduces the gradients it does not have yet before its first forward."""
    execute = interpreter._Walk._forward

    def early(self: interpreter._Walk, instruction: Instruction) -> None:
        if dist.get_rank() == 0:
            for reduce in (step for step in self.iteration.program.instructions if step.op == "reduce"):
                self.gradients.start(reduce)
        execute(self, instruction)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter._Walk, "_forward", early)
        return train_ncclish(folder, options, settings)
