"""What is printed for a person: names as they are, and what a mistyped command may have meant."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from arachnec.backends.torch_distributed.local_run import Display
from arachnec.backends.torch_distributed.reporting.report import Note
from arachnec.cli import run
from arachnec.commands.tables import plain_table
from arachnec.views.format import terminal

ODD = "pip install 'arachnec[plots]' [bold]x[/] [/red] :smile:"


def test_brackets_in_names_and_messages_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    console = terminal()
    console.print(ODD)
    table = plain_table(ODD)
    table.add_column(ODD)
    table.add_row(ODD)
    console.print(table)
    with Display(console) as display:
        display.show(msgspec.json.encode(Note(ODD)))
    assert capsys.readouterr().out.count(ODD) == 5


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["complie"], "did you mean `compile`?"),
        (["cluster", "detct"], "did you mean `detect`?"),
        (["run", "folder", "--rank", "2"], "Did you mean '--ranks'?"),
        (["frobnicate", "--help"], "commands are compile, run,"),
    ],
)
def test_a_mistyped_command_is_answered_with_the_nearest(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 2
    assert says in capsys.readouterr().err


def test_the_title_of_an_odd_model_is_printed_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[1] / "golden" / "check" / "valid.cascade").read_text()
    folder = tmp_path / "[bold]plan[red]"
    folder.mkdir()
    (folder / "a.cascade").write_text(text)
    assert run(["show", str(folder / "a.cascade"), "--svg", str(folder / "a.svg")]) == 0
    assert f"wrote {folder / 'a.svg'}" in capsys.readouterr().out
