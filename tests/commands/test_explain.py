"""``arachnec explain`` on files, folders and wrong input."""

from __future__ import annotations

from pathlib import Path

import pytest

from arachnec.cli import run

HERE = Path(__file__).parent / "explain"


def test_the_explanation_of_a_plan_reads_as_expected(
    capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    assert run(["explain", str(HERE / "plan.cascade"), "--no-what-if"]) == 0
    printed, expect = capsys.readouterr().out, HERE / "plan.expect"
    if request.config.getoption("--update-golden"):
        expect.write_text(printed, encoding="utf-8")
    assert printed == expect.read_text(encoding="utf-8")


def test_what_would_change_a_plan_is_planned_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", str(HERE / "plan.cascade"), "--budget", "0ms"]) == 0
    said = capsys.readouterr().out.partition("What would change it\n")[2].splitlines()
    assert said[0].startswith("  Planned again with that budget it takes ")
    titles = [line.strip().partition(":")[0] for line in said[1:]]
    assert titles == [
        "One more node (12 in all instead of 8)",
        "Twice the memory on each (158 GiB)",
        "No cascade on more than 4 ranks",
        "Encoders one step ahead, so that nothing waits for them",
        "Clips encoded beforehand",
    ]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(["none"], "there is no none"), ([str(HERE / "plan.cascade"), "--budget", "soon"], "such as 500ms")],
)
def test_wrong_input_exits_with_2_and_says_why(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["explain", *arguments]) == 2
    assert reason in capsys.readouterr().err
