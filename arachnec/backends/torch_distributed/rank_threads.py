"""The threads of a rank that work beside the one that trains; they stay from step to step."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from arachnec.backends.torch_distributed.handoffs import HandoffThreads


@dataclass(frozen=True)
class RankThreads:
    """One that makes batches, and those of handoffs."""

    batches: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "batches"))
    handoffs: HandoffThreads = field(default_factory=HandoffThreads)

    def close(self) -> None:
        self.batches.shutdown(wait=False, cancel_futures=True)
        self.handoffs.close()
