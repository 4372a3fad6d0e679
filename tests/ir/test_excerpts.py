"""The line that a message shows: found in a long text or file, cut to its width, and one that is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from arachnec.ir import diagnostic
from arachnec.ir.diagnostic import Diagnostic, Span, render
from arachnec.ir.limits import WIDEST_LINE


class Wrong(Diagnostic):
    title = "wrong"
    label = "here"


TEXTS = ("a\nb\n\nd", "\n\n\n", "", "ab\ncd\n", "x\r\ny\r\n", "ab" * 10, "a\n" * 9 + "end\n")


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("piece", [1, 2, 3, 7, 100])
def test_a_line_is_that_of_the_text_whatever_is_read_at_once(
    text: str, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnostic, "PIECE", piece)
    path = tmp_path / "text"
    path.write_bytes(text.encode())
    rows = text.splitlines()
    for line in range(len(rows) + 2):
        for source in (text, None):
            shown = render(Wrong(Span(str(path), line, 1, line, 2)), source).splitlines()[2:]
            if 1 <= line <= len(rows):
                gutter = " " * len(str(line))
                assert shown == [f" {gutter} |", f" {line} | {rows[line - 1]}", f" {gutter} | ^ here"]
            else:
                assert shown == ["   = here"]


def test_a_long_line_is_cut_around_its_place_and_its_letters_are_printable(tmp_path: Path) -> None:
    text = "a" * 3000 + "\x1b\ufffd" + "b" * 3000
    _, row, carets = render(Wrong(Span("text", 1, 3001, 1, 3003)), text).splitlines()[2:]
    assert len(row) == WIDEST_LINE + len(" 1 | ")
    assert row[carets.index("^") :].startswith("?\ufffdb")
    assert carets.endswith("^^ here")


def test_a_place_far_behind_what_is_read_of_a_line_is_told_in_few_letters(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("a" * (3 * 2**20))
    assert len(render(Wrong(Span(str(path), 1, 2**40, 1, 2**40 + 1)))) < 4 * WIDEST_LINE
