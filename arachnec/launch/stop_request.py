"""A signal that asks a run to end after the step that it is in, with a checkpoint. In: signals. Out: the first of them.

The rank that has it says so where all ranks exchange what they measured of a step, so that all end after the same one.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection
from dataclasses import dataclass

SIGNALS = (signal.SIGTERM, signal.SIGINT)
AGAIN_S = 1.0  # within which a signal is the same one: `timeout`, torchrun and a terminal tell a process and its group


@dataclass
class StopRequest:
    """``signum`` is 0 until there was one."""

    signum: int = 0
    _since: float = 0.0

    def note(self, signum: int) -> None:
        """The first signal, where nobody asks whether it is one more."""
        if not self.signum:
            self.signum, self._since = signum, time.monotonic()

    def take(self, signals: Collection[int]) -> bool:
        """Note the first signal. False where it is one more, which asks to end at once."""
        self.note(next(number for number in SIGNALS if number in signals))
        return time.monotonic() - self._since < AGAIN_S


def exit_code(signum: int) -> int:
    """What a process returns that a signal has ended, as a shell says it."""
    return 128 + signum
