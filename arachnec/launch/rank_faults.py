"""What a person reads when a rank is gone, silent, too slow or on its own."""

from __future__ import annotations

from dataclasses import dataclass

from arachnec.ir.diagnostic import Diagnostic


@dataclass(frozen=True)
class RankGone(Diagnostic):
    title = "rank {rank} of {world} on host {host} {what}; the others were stopped{last}"
    help = "the output of that host says more; if the system was out of memory, use fewer ranks or smaller clips"
    rank: int
    world: int
    host: str
    what: str
    last: str
