"""What a person reads when a rank is gone, silent, too slow or on its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from arachnec.ir.diagnostic import Diagnostic


@dataclass(frozen=True)
class RankGone(Diagnostic):
    title = "rank {rank} of {world} on host {host} {what}; the others were stopped{last}"
    help = (
        "the output of that host says more; if the system was out of memory, use fewer ranks or smaller clips"
    )
    rank: int
    world: int
    host: str
    what: str
    last: str


@dataclass(frozen=True)
class TookTooLong(Diagnostic):
    title = (
        "rank {rank} on host {host} has been in {phase} for {seconds:.1f} s; its limit is {limit:g} s{cause}"
    )
    help = "if it was only slow, raise the limit with {option}; ranks stood at:\n{places}"
    rank: int
    host: str
    phase: str
    seconds: float
    limit: float
    option: str
    cause: str
    places: str


@dataclass(frozen=True)
class Stalled(Diagnostic):
    title = (
        "rank {rank} on host {host} is silent: in {phase} it has been in {doing} for {seconds:.0f} s{others}"
    )
    help = (
        "its limit is {limit:g} s; if it was only slow, raise that with --stall-timeout; ranks stood at:\n{places}"
    )
    rank: int
    host: str
    phase: str
    doing: str
    seconds: float
    others: str
    limit: float
    places: str


@dataclass(frozen=True)
class StoreLost(Diagnostic):
    title = "rank {rank} on host {host} cannot reach the rendezvous store any more ({reason})"
    help = (
        "the first node keeps it: it has ended or the network between it and {host} is cut; its own output says more"
    )
    rank: int
    host: str
    reason: str


@dataclass(frozen=True)
class LoopLeft(Diagnostic):
    title = "rank {rank} left its loop after {done}, and rank {other} is in step {step}"
    help = (
        "a step needs all ranks: leave the loop on every rank behind the same step, by break, return, sys.exit or an "
        "exception that you catch"
    )
    rank: int
    done: str
    other: int
    step: int
