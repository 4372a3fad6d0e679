"""A rank that has not joined yet, and whose agent is gone. In: a block of code. Out: nothing, or the process's end.

Nobody watches over such a rank, and it would wait as long as a start may take for the store that its agent kept.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

AGENTS_STORE = "TORCHELASTIC_USE_AGENT_STORE"
POLL_S = 0.5
EXIT_CODE = 2


@contextmanager
def ends_with_its_agent() -> Iterator[None]:
    """Until the block has ended, this process ends with its parent, where that keeps the store to be joined."""
    if os.environ.get(AGENTS_STORE) != "True":
        yield
        return
    joined = threading.Event()
    watch = threading.Thread(target=_end_with, args=(os.getppid(), joined), name="agent-watch", daemon=True)
    watch.start()
    try:
        yield
    finally:
        joined.set()
        watch.join()


def _end_with(parent: int, joined: threading.Event) -> None:
    while not joined.wait(POLL_S):
        if os.getppid() != parent:
            rank = os.environ.get("RANK", "?")
            print(f"error: rank {rank} had not joined the others when its launcher ended", file=sys.stderr, flush=True)
            os._exit(EXIT_CODE)
