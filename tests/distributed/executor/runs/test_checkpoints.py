"""Checkpoints of several ranks: written beside training, whole together, and only resumed by the same run."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist

from arachnec.backends.torch_distributed.checkpoints import checkpoint
from arachnec.backends.torch_distributed.checkpoints.initial_run import (
    demand_average_goes_on,
    demand_same_optimizer,
    kinds_left,
)
from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.checkpoint.files import FileRecord
from arachnec.checkpoint.folder import Position, committed, read_commit, step_folder, write_commit
from arachnec.checkpoint.parts import AVERAGE, Part, State
from arachnec.executable.training_options import Training
from arachnec.ir.diagnostic import UserError
from tests.distributed import whole_checkpoints
from tests.distributed.executor_cases import Work, clip, executable, train_on
from tests.distributed.harness import RankError, run_ranks

POSITION = Position(1, 0, "model", 4, "data", accumulate=2)
CPU = torch.device("cpu")
WORKS = [Work((0,), (0,), 0.0), Work((1,), (1,), 0.0)]


def held() -> dict[str, torch.Tensor]:
    return {"all": torch.arange(8.0), "mine": torch.full((3,), float(dist.get_rank()))}


def state_of(values: dict[str, torch.Tensor]) -> State:
    rank, world = dist.get_rank(), dist.get_world_size()
    return {"all": values["all"], "mine": Part(values["mine"], 3 * rank, 3 * world)}


def saved_and_changed(folder: Path) -> list[bool]:
    """What is changed after ``save`` has returned is not in the checkpoint, though it is written later."""
    values = held()
    checkpoints = checkpoint.Checkpoints(folder)
    checkpoints.save(state_of(values), POSITION)
    for value in values.values():
        value.fill_(-1.0)
    checkpoints.finish()
    checkpoints.close()
    assert whole_checkpoints.load(folder, state_of(values), changed({"steps": 0})) == POSITION
    return [torch.equal(values[name], value) for name, value in held().items()]


def test_a_checkpoint_is_of_the_moment_it_was_asked_for(tmp_path: Path) -> None:
    assert run_ranks(2, saved_and_changed, tmp_path) == [[True, True], [True, True]]
    commit = read_commit(step_folder(tmp_path, 1))
    assert commit is not None
    assert [record.name for record in commit.files] == ["rank-00000.safetensors", "rank-00001.safetensors"]


def refusals(folder: Path) -> list[str]:
    whole_checkpoints.save(folder, state_of(held()), POSITION)
    return [told(functools.partial(whole_checkpoints.load, folder, state_of(held()), changed(case))) for case in CASES]


def changed(changes: dict[str, object]) -> Position:
    return msgspec.structs.replace(POSITION, **changes)


def told(act: Callable[[], object]) -> str:
    try:
        act()
    except UserError as error:
        return str(error)
    return ""


CASES: list[dict[str, object]] = [{"model": "other"}, {"data": "other"}, {"seed": 9}, {"accumulate": 1}, {"clips": 5}]


def test_only_the_same_run_resumes(tmp_path: Path) -> None:
    for said in run_ranks(2, refusals, tmp_path):
        assert "another model file" in said[0]
        assert "other clips, or in other batches" in said[1]
        assert "draws with seed 0, this run with 9" in said[2]
        assert "a step of it is 2 global batches, of this run 1" in said[3]
        assert "it counts 4 clips, and 1 steps of these batches have 5" in said[4]


def on_a_full_disk(folder: Path) -> str:
    def full(path: Path, parts: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(checkpoint, "write_file", full)
        return told(lambda: whole_checkpoints.save(folder, state_of(held()), POSITION))


def test_a_full_disk_is_one_message_on_every_rank_and_no_checkpoint(tmp_path: Path) -> None:
    said = run_ranks(2, on_a_full_disk, tmp_path)
    assert said == ["rank 1 could not write the checkpoint: no space left on device"] * 2
    assert committed(tmp_path) == []


def test_a_run_begins_where_there_is_no_checkpoint_and_keeps_out_of_anothers(tmp_path: Path) -> None:
    folder = executable(tmp_path / "build", [(clip("a", 3), clip("b", 5))], WORKS, 2)
    kept = tmp_path / "kept"
    assert train_on(2, folder, more=1, checkpoint=kept, resume=True)["steps"][0]["step"] == 0
    with pytest.raises(RankError, match="holds checkpoints, the newest of step 1"):
        train_on(2, folder, steps=1, checkpoint=kept)
    train_on(2, folder, more=3, checkpoint=kept, resume=True, every=1, keep=3)
    assert sorted(path.name for path in kept.glob("step-*")) == ["step-00000002", "step-00000003", "step-00000004"]
    commit = read_commit(step_folder(kept, 4))
    assert commit is not None
    assert (commit.position.steps, commit.position.clips) == (4, 8)


def ends_of_averages(folder: Path) -> list[str]:
    for name in ("with", "without"):
        values = {"master/w": torch.ones(2)} | ({f"{AVERAGE}/w": torch.ones(2)} if name == "with" else {})
        whole_checkpoints.save(folder / name, values, POSITION)
    cases = [
        ("with", 0.9, RunOptions()),
        ("with", 0.0, RunOptions()),
        ("with", 0.0, RunOptions(ema=0.0)),
        ("with", 0.0, RunOptions(settings=("ema=0",))),
        ("without", 0.0, RunOptions()),
    ]
    return [told(functools.partial(resumed_with, folder / name, ema, options)) for name, ema, options in cases]


def resumed_with(folder: Path, ema: float, options: RunOptions) -> None:
    whole = checkpoint.newest(folder)
    assert whole is not None
    demand_average_goes_on(whole, Training(ema=ema), options)


def test_averages_end_only_where_a_run_is_told_so(tmp_path: Path) -> None:
    for said in run_ranks(2, ends_of_averages, tmp_path):
        assert "has averages of the weights (ema), and this run would keep none" in said[1]
        assert said[:1] + said[2:] == [""] * 4


def test_state_of_other_options_is_told_that_a_run_leaves_behind() -> None:
    """Of parameters that the rank has itself; averages and predictors are told of by others."""
    stored = ["master/w", "exp_avg/w", "exp_avg_sq/w", "step/w", "ema/w", "exp_avg/other.rank", "predictor/layer/w"]
    assert kinds_left(stored, ["master/w", "exp_avg/w", "exp_avg_sq/w", "step/w"]) is None
    assert kinds_left(["master/w"], ["master/w", "exp_avg/w"]) is None
    said = kinds_left(stored, ["master/w", "momentum_buffer/w", "buffer"])
    assert said is not None and said.startswith("the checkpoint has exp_avg, exp_avg_sq, step of other options")


def test_only_the_optimizer_that_a_checkpoint_was_made_with_goes_on(tmp_path: Path) -> None:
    """One of before does not say which; its digest is still that of what it says."""
    for position, optimizer, refused in [
        (msgspec.structs.replace(POSITION, optimizer="AdamW"), "AdamW", False),
        (msgspec.structs.replace(POSITION, optimizer="AdamW"), "SGD", True),
        (POSITION, "SGD", False),
    ]:
        step_folder(tmp_path, 1).mkdir(exist_ok=True)
        write_commit(step_folder(tmp_path, 1), position, [FileRecord("rank-00000.safetensors", 0, "")])
        commit = read_commit(step_folder(tmp_path, 1))
        assert commit is not None and commit.position == position
        whole = checkpoint.Whole(step_folder(tmp_path, 1), commit)
        if not refused:
            demand_same_optimizer(whole, optimizer)
            continue
        with pytest.raises(UserError, match="has the state of AdamW, and this run would update with SGD") as told:
            demand_same_optimizer(whole, optimizer)
        assert len(told.value.diagnostics) == 1


def test_a_commit_from_before_optimizers_were_named_is_whole(tmp_path: Path) -> None:
    path = step_folder(tmp_path, 1)
    path.mkdir()
    position = {"steps": 1, "seed": 0, "model": "m", "clips": 4, "data": "d", "init": "", "source": "", "accumulate": 2}
    files = [{"name": "rank-00000.safetensors", "bytes": 0, "sha256": ""}]
    said = {"format": 2, "position": position, "files": files, "digest": ""}
    digest = hashlib.sha256(json.dumps(said, separators=(",", ":")).encode()).hexdigest()
    (path / "commit.json").write_text(json.dumps(said | {"digest": digest}))
    commit = read_commit(path)
    assert commit is not None and commit.digest == digest
