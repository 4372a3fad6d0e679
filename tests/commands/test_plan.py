"""`arachnec plan`: measured durations in, a plan or one message out."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from arachnec.cli import run
from arachnec.cluster.device_specs import DEVICE_SPECS

TABLE = Path(__file__).parents[2] / "examples" / "tables" / "four_tasks.json"
REPORT = {
    "makespan_ms", "iteration_ms", "bound_ms", "gap", "proved_optimal", "imbalance", "planning_ms",
    "peak_memory_gib", "cascades",
}  # fmt: skip


@pytest.mark.parametrize(("cluster", "optimum"), [("8:h100-80g", 91_070), ("16:h100-80g", 49_960), ("2x8:h20", 49_960)])
def test_the_four_tasks_are_planned_and_proved(
    cluster: str, optimum: float, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", str(TABLE), "--cluster", cluster, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) >= REPORT
    assert report["makespan_ms"] == pytest.approx(optimum)
    assert report["proved_optimal"] is True
    assert report["gap"] == pytest.approx(0)
    assert_valid(report, json.loads(TABLE.read_text()), 8 if cluster[0] == "8" else 16)


def assert_valid(report: dict[str, object], table: dict[str, object], world: int) -> None:
    """The plan against the table alone."""
    rows = {(row["name"], row["stage"]): row for row in report["cascades"]}  # type: ignore[attr-defined]
    busy: dict[int, list[tuple[float, float]]] = {}
    for task in table["tasks"]:  # type: ignore[attr-defined]
        ready = 0.0
        for stage in task["stages"]:
            row = rows.pop((task["name"], stage["stage"]))
            assert row["end_ms"] - row["start_ms"] == pytest.approx(stage["ms"][str(row["degree"])])
            assert row["start_ms"] >= ready - 1e-6
            assert len(set(row["ranks"])) == row["degree"]
            ready = row["end_ms"]
            for rank in row["ranks"]:
                busy.setdefault(rank, []).append((row["start_ms"], row["end_ms"]))
    assert not rows
    assert set(busy) <= set(range(world))
    for runs in busy.values():
        runs.sort()
        assert all(later[0] >= earlier[1] - 1e-6 for earlier, later in pairwise(runs))


def test_a_person_gets_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", str(TABLE), "--cluster", "8:h100-80g"]) == 0
    out = capsys.readouterr().out
    assert "91.07 s" in out and "proved optimal" in out and "D_241" in out


@pytest.mark.parametrize("dit", [{"1": 100, "2": 55}, {"1": 0, "2": 0}])
def test_a_stage_that_took_no_time_counts_as_a_microsecond(
    dit: dict[str, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = [{"stage": "vae", "ms": {"1": 0}}, {"stage": "dit", "ms": dit}]
    table = tmp_path / "t.json"
    table.write_text(json.dumps({"tasks": [{"name": name, "stages": stages} for name in "abc"]}))
    assert run(["plan", str(table), "--cluster", "4:h100-80g", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    for task in "abc":
        first, then = sorted((r for r in report["cascades"] if r["name"] == task), key=lambda row: row["start_ms"])
        assert (first["stage"], then["stage"]) == ("vae", "dit")
        assert first["end_ms"] - first["start_ms"] == pytest.approx(1e-3)
        assert then["start_ms"] >= first["end_ms"] - 1e-9


def test_one_gpu_is_told_in_the_singular(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "t.json"
    table.write_text('{"tasks": [{"name": "a", "stages": [{"stage": "x", "ms": {"2": 3}}]}]}')
    assert run(["plan", str(table), "--cluster", "1:h100-80g"]) == 2
    said = capsys.readouterr().err
    assert "has no legal degree on 1 GPU\n" in said and "at least 2 GPUs" in said


def test_seconds_and_tasks_of_one_name_are_understood(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stages = [{"stage": "dit", "s": {"1": 2, "2": 1.5}}]
    table = tmp_path / "t.json"
    table.write_text(json.dumps({"unit": "s", "tasks": [{"name": "a", "stages": stages}] * 3}))
    assert run(["plan", str(table), "--cluster", "2:cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["makespan_ms"] == pytest.approx(3500)
    assert [row["name"] for row in report["cascades"]] == ["a", "a", "a"]


def test_the_key_of_the_times_is_their_unit_where_the_table_names_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "t.json"
    table.write_text('{"tasks": [{"name": "a", "stages": [{"stage": "dit", "s": {"1": 2}}]}]}')
    assert run(["plan", str(table), "--cluster", "2:cpu", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan_ms"] == pytest.approx(2000)


def test_other_schedulers_plan_the_same_table(capsys: pytest.CaptureFixture[str]) -> None:
    passes = "schedule-static{degree=4},place"
    assert run(["plan", str(TABLE), "--cluster", "8:h100-80g", "--passes", passes, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["makespan_ms"] > 91_070
    assert not report["proved_optimal"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "not JSON"),
        ("[1, 2]", "the table is [1, 2], expected an object"),
        ('{"tasks": []}', "no tasks"),
        ('{"unit": "h", "tasks": [1]}', "`unit` is h, expected ms or s"),
        ('{"unit": "ms", "tasks": [{"name": "a", "stages": [{"stage": "x", "s": {"1": 3}}]}]}', "beside the `s`"),
        ('{"tasks": [{"name": "a", "stages": [{"stage": "x", "ms": {"1": 3, "1": 4}}]}]}', ":1:67"),
        ('{"tasks": [], "tasks": []}', "`tasks` is given twice"),
        ('{"task": []}', "did you mean `tasks`?"),
        ("[" * 100000, "nested"),
        ("[" + "9" * 5000 + "]", "digits"),
        ('{"tasks": [{"name": "a"}]}', "`stages` of task `a` is missing"),
        ('{"tasks": [{"name": "a", "stages": [{"stage": "x"}]}]}', "without times"),
        ('{"tasks": [{"name": "a", "stages": [{"stage": "x", "ms": {}}]}]}', "an object from degree to time"),
        ('{"tasks": [{"name": "a", "stages": [{"stage": "x", "ms": {"0": 3}}]}]}', "a whole number from 1"),
        ('{"tasks": [{"name": "a", "stages": [{"stage": "x", "ms": {"1": -3}}]}]}', "a number from 0"),
        ('{"tasks": [{"name": "a", "stages": [{"stage": "x", "ms": {"64": 3}}]}]}', "has no legal degree on 8 GPUs"),
    ],
)
def test_a_wrong_table_gets_one_message_and_exit_code_2(
    text: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "t.json"
    table.write_text(text)
    assert run(["plan", str(table), "--cluster", "8:h100-80g"]) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert said.count("error:") == 1


def test_a_missing_table_gets_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plan", "nowhere.json", "--cluster", "8:h100-80g"]) == 2
    assert "there is no file `nowhere.json`" in capsys.readouterr().err


def test_a_table_is_planned_for_nodes_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Durations are those of the fastest devices: an A100 takes as much longer as it computes less."""
    table = {"tasks": [{"name": str(n), "stages": [{"stage": "dit", "ms": {"1": 100}}]} for n in range(4)]}
    file = tmp_path / "t.json"
    file.write_text(json.dumps(table), encoding="utf-8-sig")
    passes = "schedule-z3{steps=20},place"
    assert run(["plan", str(file), "--cluster", "1x2:h100+1x2:a100", "--passes", passes, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    slower = DEVICE_SPECS["h100-80g"].sustained / DEVICE_SPECS["a100-80g"].sustained
    assert report["makespan_ms"] == pytest.approx(100 * min(2, slower), rel=1e-4)
    assert report["bound_ms"] <= report["makespan_ms"] + 1e-6
    for row in report["cascades"]:
        expected = 100 * (slower if row["ranks"][0] >= 2 else 1)
        assert row["end_ms"] - row["start_ms"] == pytest.approx(expected, rel=1e-4)


def test_a_time_too_long_to_plan_is_told_where_it_stands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "t.json"
    file.write_text('{"tasks": [{"name": "a", "stages": [{"stage": "x", "s": {"1": 9e14}}]}]}')
    assert run(["plan", str(file), "--cluster", "2:cpu"]) == 2
    assert "less than 1e+12" in capsys.readouterr().err


def test_times_too_long_together_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "t.json"
    tasks = ", ".join(f'{{"name": "{name}", "stages": [{{"stage": "x", "ms": {{"1": 9e14}}}}]}}' for name in "ab")
    file.write_text(f'{{"tasks": [{tasks}]}}')
    assert run(["plan", str(file), "--cluster", "1:cpu"]) == 2
    told = capsys.readouterr().err
    assert "the sum of all tasks' longest times is 1800000000000000.0, expected 1e+15 ms at most" in told
