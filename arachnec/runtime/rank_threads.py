"""The threads of a rank that work beside the one that trains; they stay from step to step."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from arachnec.runtime.handoffs import HandoffThreads
from arachnec.solver.budget import usable_cores

MOST_LOADERS = 4


@dataclass(frozen=True)
class RankThreads:
    """One that makes batches, those that load clips for encoders, and those of handoffs."""

    batches: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "batches"))
    loads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(loaders(), "loads"))
    handoffs: HandoffThreads = field(default_factory=HandoffThreads)

    def close(self) -> None:
        self.batches.shutdown(wait=False, cancel_futures=True)
        self.loads.shutdown(wait=False, cancel_futures=True)
        self.handoffs.close()


def spare_cores() -> int:
    """Cores of this rank beside the one that trains."""
    return max(0, usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")) - 1)


def loaders() -> int:
    """Threads that load clips: of this rank's cores all but one, and one where it has no more."""
    return min(MOST_LOADERS, max(1, spare_cores()))
