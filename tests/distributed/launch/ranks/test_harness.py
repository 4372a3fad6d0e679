import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.executable.training_options import Training
from tests.distributed import executor_cases
from tests.distributed.executor_cases import Work, executable
from tests.distributed.harness import RankError, RankPool, run_ranks


def total(value: float) -> float:
    x = torch.tensor([value * (dist.get_rank() + 1)])
    dist.all_reduce(x)
    return float(x)


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError("lost")
    dist.barrier()


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(3)
    dist.barrier()


def test_every_rank_runs_the_function_and_answers_in_order() -> None:
    assert run_ranks(3, total, 2.0) == [12.0, 12.0, 12.0]


def test_the_first_error_of_a_rank_is_raised_with_its_traceback_and_the_pool_recovers() -> None:
    pool = RankPool(2)
    with pytest.raises(RankError, match=r"(?s)rank 1: .*fail_on.*KeyError: 'lost'"):
        pool.run(fail_on, 1)
    assert pool.run(total, 1.0) == [3.0, 3.0]
    with pytest.raises(RankError, match="rank 0: the process died"):
        pool.run(die_on, 0)
    pool.close()


def compare_on(rank: int, limit: float) -> None:
    error = 0.25 * dist.get_rank()
    assert dist.get_rank() != rank or error < limit
    dist.barrier()


def test_a_failed_assertion_of_a_rank_is_told_with_the_values_it_compared() -> None:
    with pytest.raises(RankError, match=r"(?s)rank 1: .*error < limit.*error = 0.25\n.*limit = 0.125\n.*Assertion"):
        run_ranks(2, compare_on, 1, 0.125)


def test_a_rank_that_hangs_ends_the_run() -> None:
    pool = RankPool(2)
    pool.run(total, 1.0)
    with pytest.raises(RankError, match="no answer"):
        pool.run(hang_on_0, timeout=0.5)


def hang_on_0() -> None:
    if dist.get_rank() == 0:
        dist.recv(torch.zeros(1), 1)


def kept_by(folder: Path, steps: int) -> tuple[int, ...]:
    """How many captures and examples this rank has, before and behind a step with the model in a folder."""
    before = len(executor_cases._CAPTURED), len(executor_cases._EXAMPLES)
    executor_cases.train(folder, RunOptions(steps=steps))
    return *before, len(executor_cases._CAPTURED), len(executor_cases._EXAMPLES)


@pytest.mark.parametrize("training", [Training(), Training(dtype="bf16")], ids=["fp32", "bf16"])
def test_ranks_are_born_with_the_captures_that_a_step_makes(training: Training, tmp_path: Path) -> None:
    """Made on another device, or of samples in another precision, they would be made again by every rank."""
    clips = (executor_cases.clip("a", 3),)
    folder = executable(tmp_path, [clips], [Work((0,), (0, 1), 0.0)], 2, training=training)
    pool = RankPool(2)
    try:
        for captures, examples, *after in pool.run(kept_by, folder, 1):
            assert captures and examples and [captures, examples] == after
    finally:
        pool.close()
