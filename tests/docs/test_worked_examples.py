"""Somebody who follows a page on how to add something ends with something that works."""

from pathlib import Path

import pytest

from tests.docs.worked_examples import ROOT, changed, follow, scratch_copy
from tests.slow import quick

PAGES = sorted((ROOT / "docs").glob("add_*.md"))
QUICK = [page.stem for page in PAGES if page.stem != "add_an_instruction"]  # which traces and trains


@pytest.mark.parametrize("page", quick({page.stem: page for page in PAGES}, *QUICK))
def test_every_step_of_a_worked_example_works(page: Path, tmp_path: Path) -> None:
    follow(page, scratch_copy(tmp_path))


def test_a_change_to_lines_that_are_not_there_is_noticed() -> None:
    assert changed("a\nb\n", " a\n+x\n b\n", "file") == "a\nx\nb\n"
    with pytest.raises(AssertionError, match="file has these lines 0 times"):
        changed("a\nb\n", " c\n+x\n", "file")
