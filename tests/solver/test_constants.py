"""The table of docs/planning.md says the numbers that are in the code, and what was measured of them."""

from __future__ import annotations

import importlib
import json
import re
import runpy
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/planning.md").read_text(encoding="utf-8")
SCRIPT = runpy.run_path(str(ROOT / "benchmarks/portfolio_constants.py"))


def test_the_table_says_the_numbers_of_the_code() -> None:
    shown = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", PAGE.split(SCRIPT["HEADING"])[1], re.MULTILINE))
    for number in SCRIPT["NUMBERS"][1:]:
        value = getattr(importlib.import_module(number.module), number.name)
        told = [float(part.replace(",", "").split()[0]) for part in shown[number.name].split(";")]
        assert told == np.atleast_1d(value).tolist(), number.name


def test_the_table_says_what_half_and_twice_changed() -> None:
    measured = json.loads((ROOT / "benchmarks/results/portfolio_constants.json").read_text(encoding="utf-8"))
    assert SCRIPT["filled"](PAGE, measured) == PAGE
