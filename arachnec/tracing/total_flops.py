"""FLOPs of what runs, all together.

torch's counter also counts by module, with hooks that fail for a module that is given a view of a parameter while no
gradients are computed, as of learned tokens that are expanded to the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class _OneModule:
    """In place of torch's tracker of modules: all that runs is in none in particular."""

    parents: frozenset[str] = frozenset({"Global"})

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass


class TotalFlops(FlopCounterMode):
    """Counts inside; ``get_total_flops`` says how many."""

    def __init__(self) -> None:
        super().__init__(display=False)
        tracker: Any = _OneModule()
        self.mod_tracker = tracker
