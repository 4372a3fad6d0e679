"""What becomes of a schedule in its own pipeline: the settings of later passes that a plan depends on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Following:
    """By default what ``place,bucket`` without options do.

    ``topology`` is that of ``place``; ``mib`` that of ``bucket``. ``buckets`` says whether there is a ``bucket``,
    ``reversible`` whether it may run the plan from its end to its beginning.
    """

    topology: bool = True
    buckets: bool = True
    mib: int | None = None
    reversible: bool = True
