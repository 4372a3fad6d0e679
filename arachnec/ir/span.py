"""Where something stands in a text."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Span:
    """Lines and columns count from 1, the end is exclusive.

    ``source`` is the whole text, so that a message can show the line even when it came from no file.
    """

    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    source: str | None = field(default=None, compare=False, repr=False)
