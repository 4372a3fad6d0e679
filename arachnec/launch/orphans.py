"""A rank that has not joined yet, and whose agent is gone. In: a block of code. Out: nothing, or the process's end.

Nobody watches over such a rank, and it would wait as long as a start may take for the store that its agent kept. An
agent has its store before it starts ranks, so where nothing listens any more there was one.
"""

from __future__ import annotations

import itertools
import os
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

AGENTS_STORE = "TORCHELASTIC_USE_AGENT_STORE"
POLL_S = 0.5
PROBED = 16  # looks: so often it is asked for the store, whose agent may have been gone before the first one
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
    looks = itertools.count(1)
    while not joined.wait(POLL_S):
        if os.getppid() != parent or (next(looks) % PROBED == 0 and _nothing_listens()):
            rank = os.environ.get("RANK", "?")
            print(f"error: rank {rank} had not joined the others when its launcher ended", file=sys.stderr, flush=True)
            os._exit(EXIT_CODE)


def _nothing_listens() -> bool:
    """Whether the place of the store refuses connections; one that cannot be reached may come back."""
    try:
        with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), POLL_S):
            return False
    except ConnectionRefusedError:
        return True
    except (OSError, KeyError, ValueError):
        return False
