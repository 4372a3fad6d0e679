"""What a long command says on standard error while it computes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import pytest

from arachnec.commands.progress import progress_on_stderr
from arachnec.ir.long_computations import Reporter
from arachnec.ir.nodes import Level, Module
from arachnec.passes.infra.base import Pass
from arachnec.passes.infra.instruments import ReportProgress
from arachnec.passes.infra.pipeline import Pipeline


def printed(lines: Sequence[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    with progress_on_stderr() as reporter:
        for line in lines:
            reporter(line)
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def test_every_phase_has_a_line_where_standard_error_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(["tracing", "verifying block 1 of 2", "planning layout 1 of 9"], capsys) == [
        "tracing",
        "verifying block 1 of 2",
        "planning layout 1 of 9",
    ]


def test_a_phase_of_many_quick_steps_does_not_flood_a_log(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(printed([f"planning layout {n} of 5000" for n in range(5000)], capsys)) < 100


@dataclass(frozen=True)
class Counting(Pass):
    needs: ClassVar[Level] = Level.TRACED
    gives: ClassVar[Level] = Level.TRACED

    def run(self, module: Module) -> Module:
        return module

    def run_reporting(self, module: Module, reporter: Reporter) -> Module:
        reporter("planning layout 1 of 2")
        reporter("planning layout 2 of 2")
        return self.run(module)


def test_a_pass_reports_how_far_it_is() -> None:
    lines: list[str] = []
    Pipeline((Counting(),)).run(Module("m", Level.TRACED), [ReportProgress(lines.append)])
    assert lines == ["planning: counting", "planning layout 1 of 2", "planning layout 2 of 2"]
