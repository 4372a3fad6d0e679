"""Where the optimizer is dealt out, each layer's update is gathered behind the next step's first layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.backends.torch_distributed.run.training_run import Trainer
from arachnec.executable.folder import read_executable
from arachnec.executable.training_options import Training
from tests.distributed.executor.cells.test_cells import CLIPS, LAYERS, ordered
from tests.distributed.executor.runs.test_executor_ncclish import train_ncclish
from tests.distributed.executor_cases import (
    Work,
    assert_same_gradients,
    captured_once,
    plain_loop,
    proved_executable,
    traced,
)
from tests.distributed.harness import run_ranks
from tests.distributed.ncclish import Settings
from tests.distributed.rank_device import rank_device
from tests.slow import quick

# Rank 3 runs nothing, rank 2 ends long before the others, clip d is shared by two.
UNEVEN = ordered(((0, 1), (0,)), ((2,), (1,)), ((3,), (0, 1)), ((4,), (2,)))


def executable(folder: Path, works: Sequence[Work], world: int, sharded: bool, training: Training) -> Path:
    module = traced(world, [CLIPS])
    attrs = {"layers": LAYERS, "params": 2614, "sharded": world if sharded else None}
    stages = tuple(replace(s, attrs=s.attrs.updated(**attrs)) if s.trained else s for s in module.stages)
    module = replace(module, stages=stages)
    return proved_executable(folder, module, works, CLIPS, training=training)


def steps(folder: Path, count: int) -> tuple[list[tuple[float, float]], dict[str, Tensor]]:
    """Loss and norm of each step, and the weights behind the last one.

    Somebody looks at the weights behind every second step, as a loop of one's own may, and rank 1 does not wait for
    them.
    """
    reports = []
    with captured_once():
        trainer = Trainer(read_executable(folder), RunOptions(), rank_device())
        for number in range(count):
            reports.append(trainer.step(number))
            if number % 2 == 0:
                trainer.start_gathers()
                if dist.get_rank() != 1 or number + 1 == count:
                    trainer.finish_gathers()
    trainer.close()
    weights = {name: value.detach().clone() for name, value in trainer._context.parameters.items()}
    return [(report.loss, report.gradient_norm) for report in reports], weights


@pytest.mark.parametrize("dtype", quick(["fp32", "bf16"], "bf16"))
def test_steps_are_those_of_an_optimizer_that_is_whole(tmp_path: Path, dtype: str) -> None:
    training = Training(lr=1e-2, ema=0.9, dtype=dtype, clip_norm=0.5)  # type: ignore[arg-type]
    whole, dealt_out = (
        run_ranks(4, steps, executable(tmp_path / str(sharded), UNEVEN, 4, sharded, training), 3)
        for sharded in (False, True)
    )
    limit, rounding = (1e-6, 1e-5) if dtype == "fp32" else (2**-7, 1e-3)
    for (told, weights), (expected, same) in zip(dealt_out, whole, strict=True):
        torch.testing.assert_close(torch.tensor(told), torch.tensor(expected), rtol=limit, atol=0)
        for name, value in weights.items():
            if not name.endswith("qkv.bias"):  # of keys it has no gradient but rounding, which Adam makes large
                torch.testing.assert_close(value, same[name], rtol=limit, atol=rounding)
            torch.testing.assert_close(value, dealt_out[0][1][name], rtol=0, atol=0)


def test_a_step_over_nccls_semantics_has_the_gradients_of_a_plain_loop(tmp_path: Path) -> None:
    """Gathers beside the cascades' own collectives, each host ahead of its device; nobody waits for all of them."""
    folder = executable(tmp_path, UNEVEN, 4, True, Training())
    saved = tmp_path / "g.safetensors"
    settings = Settings(eager=True, kernels=2, delay=1e-3)
    for counts in run_ranks(4, train_ncclish, folder, RunOptions(save_gradients=saved), settings):
        assert not counts.freed_in_flight and not counts.written_in_flight
        assert counts.connected_in_use == 0
    assert_same_gradients(saved, plain_loop(folder, CLIPS)[1])
