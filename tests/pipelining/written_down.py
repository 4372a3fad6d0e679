"""Answers of drawn instances against those in a file beside the test, which ``--update-golden`` writes anew."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path

Row = list[object]
Kind = tuple[Callable[[random.Random], Row], int]  # what answers for an instance, and how many are drawn


def plain(value: object) -> object:
    """As JSON gives it back, floats to nine digits."""
    if isinstance(value, dict):
        value = list(value.items())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(f"{value:.9g}") if abs(value) != float("inf") else str(value)
    return value if value is None or isinstance(value, bool | int | str) else str(value)


def digest(value: object) -> str:
    """Of a table too long to be written down."""
    return hashlib.sha256(json.dumps(plain(value)).encode()).hexdigest()[:10]


def require_as_written(file: Path, name: str, kind: Kind, *, update: bool) -> None:
    answer, count = kind
    rows = [plain(answer(random.Random(f"{name}/{number}"))) for number in range(count)]
    written = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    if update:
        written[name] = rows
        lines = ",\n".join(
            f'"{key}": [\n' + ",\n".join(json.dumps(row) for row in told) + "\n]" for key, told in written.items()
        )
        file.write_text("{\n" + lines + "\n}\n", encoding="utf-8")
    for number, (row, expected) in enumerate(zip(rows, written[name], strict=True)):
        assert row == expected, number
