"""Progress of long computations: what computes for seconds takes a ``Reporter`` as argument, and calls it at each step.

A line says what is being done, without a full stop: ``tracing``, ``verifying block 1 of 2``, ``planning layout 7 of
41``. Its first word names the phase. ``arachnec.commands.progress.progress_on_stderr`` gives the reporter of a command.
"""

from __future__ import annotations

from collections.abc import Callable

Reporter = Callable[[str], object]


def unreported(doing: str) -> None:
    """The reporter that shows nothing."""
