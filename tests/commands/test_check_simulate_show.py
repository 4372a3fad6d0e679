"""``arachnec check``, ``simulate`` and ``show`` on files, folders and wrong input."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from arachnec.cli import run

GOLDEN = Path(__file__).parents[1] / "golden"
VALID = GOLDEN / "check" / "valid.cascade"


@pytest.fixture
def executable(tmp_path: Path) -> Path:
    shutil.copy(VALID, tmp_path / "program.cascade")
    return tmp_path


def test_check_says_what_it_has_proved(executable: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for program in (executable, VALID):
        assert run(["check", str(program)]) == 0
        said = capsys.readouterr().out
        assert "2 clips" in said
        assert "at most 61.30 of 80.00 GiB" in said


def test_check_holds_the_fullest_device_against_its_own_memory_where_devices_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mixed = 'mixed = [[1, "small", 42 GiB, 300 TFLOP/s, 450 GB/s], [2, "large", 140 GiB, 300 TFLOP/s, 450 GB/s]]'
    text = VALID.read_text(encoding="utf-8").replace("nodes = 1, gpus = 3", "nodes = 3, gpus = 1")
    text = text.replace("memory = 80 GiB, flops", "memory = 42 GiB, flops").replace("20 us }", f"20 us, {mixed} }}")
    (tmp_path / "program.cascade").write_text(text, encoding="utf-8")
    assert run(["check", str(tmp_path)]) == 0
    assert "of 42.00 GiB, on rank 0" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["check", "simulate"])
def test_a_program_that_breaks_a_rule_exits_with_2_and_its_reason(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, str(GOLDEN / "check" / "sends_cross.cascade")]) == 2
    assert "deadlock" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["check", "simulate", "show"])
def test_what_is_no_program_exits_with_2(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    placed = GOLDEN / "lower" / "pipeline_1f1b.cascade"
    for wrong, reason in (
        (tmp_path, "has no program.cascade"),
        (tmp_path / "none", "there is no "),
        (placed, "placed"),
    ):
        assert run([command, str(wrong)]) == 2
        assert reason in capsys.readouterr().err


def test_simulate_reports_as_json(executable: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", str(executable), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    for key in ("makespan_ms", "iteration_ms", "bound_ms", "gap", "proved_optimal", "imbalance", "peak_memory_gib"):
        assert key in report
    assert report["makespan_ms"] == max(row["end_ms"] for row in report["cascades"])
    assert report["gap"] == pytest.approx(report["makespan_ms"] / report["bound_ms"] - 1)
    assert [row["rank"] for row in report["ranks"]] == [0, 1, 2]


def test_simulate_writes_trace_and_drawing(executable: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, svg = executable / "t.json", executable / "t.svg"
    assert run(["simulate", str(executable), "--trace", str(trace), "--svg", str(svg)]) == 0
    assert "simulated" in capsys.readouterr().out
    assert json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert svg.read_text(encoding="utf-8").startswith("<svg")


def test_show_has_planned_and_after_a_run_measured(executable: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", str(executable)]) == 0
    said = capsys.readouterr().out
    assert "planned" in said
    assert "measured" not in said
    interval = {"rank": 0, "op": "forward", "target": "t1", "start": 0.0, "end": 90.0}
    (executable / "measured.json").write_text(json.dumps({"step": 3, "intervals": [interval]}), encoding="utf-8")
    assert run(["show", str(executable)]) == 0
    said = capsys.readouterr().out
    assert "measured, step 3" in said
    assert max(map(len, said.splitlines())) <= 120
    assert "Forward of @dit: 90 ms in all, 3.8 times the planned 24 ms." in said


def test_show_writes_page_drawing_and_trace_and_says_where(
    executable: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html, svg, trace = (tmp_path / name for name in ("p.html", "p.svg", "p.json"))
    assert run(["show", str(executable), "--html", str(html), "--svg", str(svg), "--trace", str(trace)]) == 0
    said = capsys.readouterr().out
    for path in (html, svg, trace):
        assert f"wrote {path}" in said
    assert html.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert {event["ph"] for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]} >= set("MXsfC")


def test_show_after_a_run_shows_the_plan_of_the_step_that_was_measured(
    executable: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    later = VALID.read_text(encoding="utf-8").replace("module @", "module @later_")
    (executable / "measured.cascade").write_text(later, encoding="utf-8")
    interval = {"rank": 0, "op": "forward", "target": "t1", "start": 0.0, "end": 90.0}
    measured = {"step": 3, "iteration": 1, "intervals": [interval]}
    (executable / "measured.json").write_text(json.dumps(measured), encoding="utf-8")
    assert run(["show", str(executable)]) == 0
    said = capsys.readouterr().out
    assert "later_" in said
    assert "measured, step 3 of iteration 1" in said
