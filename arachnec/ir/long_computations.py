"""Long computations: each takes a ``Reporter`` that it calls at each step, and may put off the garbage collector.

A line says what is being done, without a full stop: ``tracing``, ``verifying block 1 of 2``, ``planning layout 7 of
41``. Its first word names the phase. ``arachnec.commands.progress.progress_on_stderr`` gives the reporter of a command.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Reporter = Callable[[str], object]


def unreported(doing: str) -> None:
    """The reporter that shows nothing."""


@contextmanager
def without_garbage_collector() -> Iterator[None]:
    """Without the garbage collector, which would walk all of it again and again: a fifth of the time of imports."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
