"""Errors of requests and of ``denoise`` cascades."""

from __future__ import annotations

from dataclasses import dataclass

from arachnec.ir.diagnostic import Diagnostic


@dataclass(frozen=True)
class WrongSteps(Diagnostic):
    title = "{node} has steps {steps}, {reason}"
    label = "steps {steps}"
    help = "`steps = [first, last]`, counted from 0: the last of a request of 50 is 49"
    node: str
    steps: str
    reason: str


@dataclass(frozen=True)
class UnlikeRequest(Diagnostic):
    title = "{node} has {what} = {value}, and its request {request} has {right}"
    label = "not its request's"
    help = "a batch holds requests of equal steps, branches and window, and says the same"
    node: str
    what: str
    value: str
    request: int
    right: str


@dataclass(frozen=True)
class WrongWindow(Diagnostic):
    title = "clip {clip} has {what} {value}, {reason}"
    label = "{what} {value}"
    help = "`window = [least, most]`, 0 <= least <= forecast <= most <= steps"
    clip: int
    what: str
    value: str
    reason: str


@dataclass(frozen=True)
class SwitchUnsaid(Diagnostic):
    title = "{node} {reason}"
    label = "{remedy}"
    help = "a segment says `switch` where an outcome changes which of its steps it takes, the same rule as the module's"
    node: str
    reason: str
    remedy: str
