"""How a rank says which phase of a run it is in, to whoever watches that it does not stand still."""

from __future__ import annotations

from typing import Protocol

from arachnec.launch.progress import Progress


class Enter(Protocol):
    """Says which phase the run is in now, for how many seconds at most, the option that sets this limit, and what the
    rank does in it."""

    def __call__(
        self, phase: str, limit: float | None = None, option: str = "", progress: Progress | None = None
    ) -> None: ...


def unwatched(phase: str, limit: float | None = None, option: str = "", progress: Progress | None = None) -> None:
    """Nobody minds how long a phase takes."""
