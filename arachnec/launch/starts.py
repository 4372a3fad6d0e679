"""One start of a job among several in one store: torchrun keeps its store when it starts the ranks again.

What the ranks of the start before have written, a failure above all, must not be read by those of the next. Agents do
not count restarts alike, so the ranks number their starts themselves. Every process leaves a name of its own. Rank 0
takes the next number and answers each name with it; a name of a dead process is answered too, and read by nobody.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from arachnec.ir.diagnostic import UserError, user_error

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

POLL_S = 0.05


def missing(ranks: Sequence[int], world: int, seconds: float) -> UserError:
    """The error of ranks that others have waited for."""
    named = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
    return user_error(
        f"{named} of {world} did not come within {seconds:.0f} s",
        help="look at the output of their hosts; --start-timeout gives them longer",
    )


def store_of_this_start(store: Store, rank: int, world: int, seconds: float) -> tuple[Store, int]:
    """The part of ``store`` that belongs to the ranks of this start alone, and its number, from 1. All of them call it.

    Raises ``UserError`` for ranks that do not come within ``seconds``.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    if "TORCHELASTIC_RUN_ID" not in os.environ:  # the store is new
        return store, 1
    name = uuid.uuid4().hex
    store.set(f"name/{rank}", name)
    number = _lead(store, world, seconds) if rank == 0 else _follow(store, rank, world, name, seconds)
    return PrefixStore(f"start/{number}", store), number


def _lead(store: Store, world: int, seconds: float) -> int:
    number = int(store.add("starts", 1))
    answered: set[str] = set()
    coming = list(range(1, world))
    end = time.monotonic() + seconds
    while coming:
        for rank in coming:
            name = store.get(f"name/{rank}").decode() if store.check([f"name/{rank}"]) else ""
            if name and name not in answered:
                answered.add(name)
                store.set(f"number/{name}", str(number))
        coming = [rank for rank in coming if not store.check([f"came/{number}/{rank}"])]
        if coming and time.monotonic() > end:
            raise missing(coming, world, seconds)
        time.sleep(POLL_S if coming else 0.0)
    return number


def _follow(store: Store, rank: int, world: int, name: str, seconds: float) -> int:
    try:
        store.wait([f"number/{name}"], timedelta(seconds=seconds))
    except RuntimeError as error:
        raise missing([0], world, seconds) from error
    number = int(store.get(f"number/{name}"))
    store.set(f"came/{number}/{rank}", "")
    return number
