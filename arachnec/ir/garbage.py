"""The garbage collector put off while nodes are made or walked in great numbers. In: a block of code. Out: nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_garbage_collector() -> Iterator[None]:
    """Without the garbage collector: nodes hold no cycles, and it would walk all of them again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
