"""Every step is told to all who were named: a file, TensorBoard, Weights & Biases, the model file."""

from __future__ import annotations

import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from arachnec.backends.torch_distributed.reporting.logs import AuditLine, AuditLog, StepLog
from arachnec.backends.torch_distributed.reporting.report import StepReport
from arachnec.executable.training_options import Logging, Schedule, TorchClass, Training
from arachnec.ir.diagnostic import UserError
from tests.distributed.executor_cases import Work, clip, executable, train_on
from tests.distributed.harness import RankError


def report(step: int, loss: float | None = 0.5) -> StepReport:
    return StepReport(step, 0, loss, 1.0, 10.0, 9.0, 0.1, 100.0, 0.0, 0.5, 2, lr=1e-4)


def told(training: Training, *reports: StepReport, rank: int = 0) -> list[tuple[int, Mapping[str, float]]]:
    """What ``on_step`` saw."""
    seen: list[tuple[int, Mapping[str, float]]] = []
    log = StepLog.open(training, lambda step, metrics: seen.append((step, metrics)), rank)
    for report in reports:
        log.tell(report)
    log.close()
    return seen


def test_a_file_of_lines_goes_on_and_a_loss_that_is_not_finite_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "steps.jsonl"
    training = Training(logging=Logging(jsonl=str(path)))
    assert [step for step, _ in told(training, report(0), report(1, None))] == [0, 1]
    told(training, report(2))
    lines = [msgspec.json.decode(line) for line in path.read_bytes().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[0]["loss"] == 0.5
    assert lines[0]["lr"] == 1e-4
    assert "loss" not in lines[1]
    assert told(training, report(3), rank=1) == []
    assert len(path.read_bytes().splitlines()) == 3, "one rank writes"


@pytest.mark.parametrize("torn", [b"", b'{"step": 3, "lo'])
def test_a_line_that_was_cut_off_is_taken_away(torn: bytes, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    training = Training(logging=Logging(jsonl=str(path)))
    told(training, *map(report, range(300)))
    whole = path.read_bytes()
    path.write_bytes(whole + torn)
    told(training, report(300))
    lines = path.read_bytes()
    assert len(whole) > 2**16
    assert lines.startswith(whole)
    assert msgspec.json.decode(lines[len(whole) :])["step"] == 300
    path.write_bytes(b'{"st')
    told(training, report(0))
    assert msgspec.json.decode(path.read_bytes())["step"] == 0


def test_a_disk_that_is_full_is_told_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.symlink_to("/dev/full")
    log = StepLog.open(Training(logging=Logging(jsonl=str(path))), None, 0)
    for act in (lambda: log.tell(report(0)), log.close):
        with pytest.raises(OSError, match="No space left on device") as refused:
            act()
        assert refused.value.filename == str(path)
    audit = AuditLog(tmp_path, lambda step: step // 3, 0)
    (tmp_path / "audit" / "epoch-00000.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as refused:
        audit.add(AuditLine(1, ["a"]))
    assert str(refused.value.filename).endswith("epoch-00000.jsonl")


def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    told(Training(logging=Logging(tensorboard=str(tmp_path))), report(7))
    (file,) = tmp_path.glob("events*")
    values = {v.tag: (e.step, v.simple_value) for e in LegacyEventFileLoader(str(file)).Load() for v in e.summary.value}
    assert values["loss"] == (7, 0.5)


def test_wandb_gets_the_options_and_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    run = types.SimpleNamespace(
        log=lambda metrics, step: calls.append((step, metrics["loss"])), finish=lambda: calls.append("finish")
    )
    stand_in: Any = types.ModuleType("wandb")
    stand_in.init = lambda project, config: calls.append((project, config["lr"])) or run
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    told(Training(lr=0.1, logging=Logging(wandb="videos")), report(3))
    assert calls == [("videos", 0.1), (3, 0.5), "finish"]


def test_a_package_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"`logging\.wandb` needs the package `wandb`"):
        StepLog.open(Training(logging=Logging(wandb="videos")), None, 0)


ON_STEP = """

def on_step(step, metrics):
    with open({place!r}, "a") as file:
        file.write(f"{{step}} {{metrics['lr']}}\\n")
"""


def test_the_model_file_is_told_once_a_step_and_a_schedule_that_ends_too_early_is_refused(tmp_path: Path) -> None:
    place = tmp_path / "told.txt"
    schedule = Schedule(scheduler=TorchClass("OneCycleLR", {"max_lr": 0.3, "total_steps": 3}))
    folder = executable(
        tmp_path / "build",
        [(clip("a", 3), clip("b", 2))],
        [Work((0,), (0,), 0.0), Work((1,), (1,), 0.0)],
        2,
        training=Training(schedule=schedule),
        more=ON_STEP.format(place=str(place)),
    )
    steps = train_on(2, folder, steps=3)["steps"]
    assert place.read_text().splitlines() == [f"{step['step']} {step['lr']}" for step in steps]
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=3)
    for step in steps:
        assert step["lr"] == pytest.approx(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    with pytest.raises(RankError, match="it ends before step"):
        train_on(2, folder, steps=5)
