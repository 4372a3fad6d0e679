"""``docs/limits.md`` lists the limits of what a user gives, with their values."""

from __future__ import annotations

import re
from pathlib import Path

from arachnec.ir import limits

SHOWN = Path(limits.__file__).read_text(encoding="utf-8").partition("# What is shown.\n")[2]
PAGE = (Path(__file__).parents[2] / "docs" / "limits.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(\w+)` \| ([\d.,e-]+)( MiB)? \|", re.MULTILINE)


def test_the_page_and_the_table_say_the_same() -> None:
    shown = {name for name in re.findall(r"\b[A-Z][A-Z_]+\b", SHOWN) if hasattr(limits, name)}
    table = {name: value for name, value in vars(limits).items() if name.isupper() and name not in shown}
    rows = ROW.findall(PAGE)
    assert {name: float(value.replace(",", "")) * (2**20 if unit else 1) for name, value, unit in rows} == table
    assert [name for name, *_ in rows] == list(table)
