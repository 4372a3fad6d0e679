"""Switches seen so far: a line a request in the folder of results, from which the next plan forecasts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from arachnec.sampling.loop import Sampling

SWITCHES = "switches.jsonl"
LINES, NEWEST = 10_000, 4 * 2**20  # of the newest lines, and bytes, that are read


class Seen(msgspec.Struct, frozen=True):
    """Where a request of so many steps has switched, by which rule and between which models."""

    models: tuple[str, ...]
    switch: str
    steps: int
    switched: int

    def of(self, sampling: Sampling) -> bool:
        """Whether it says something of requests that are sampled so."""
        return (self.models, self.switch) == (sampling.names, str(sampling.switch)) and self.steps > 0


def read_seen(folder: Path) -> tuple[Seen, ...]:
    """Those of earlier runs into this folder. A line that is none is left out: it is only a forecast."""
    path, seen = folder / SWITCHES, []
    if not path.is_file():
        return ()
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - NEWEST))
        lines = file.read(NEWEST).splitlines()
    for line in lines[-LINES:]:
        try:
            seen.append(msgspec.json.decode(line, type=Seen))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
    return tuple(seen)


def record_seen(folder: Path, seen: Iterable[Seen]) -> None:
    lines = b"".join(msgspec.json.encode(row) + b"\n" for row in seen)
    if lines:
        with (folder / SWITCHES).open("ab") as file:
            file.write(lines)
