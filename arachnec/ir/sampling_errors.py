"""Errors of requests and of ``denoise`` cascades."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
class WrongPlanned(Diagnostic):
    title = "{node} is planned to take {planned} steps, and it has {count}"
    label = "more than it has"
    help = "write at most `planned = {count}`, or leave it out"
    node: str
    planned: int
    count: int


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
class UncertainBatch(Diagnostic):
    title = "{node} holds {count} requests whose switches come when they come"
    label = "{count} requests, outcomes {outcomes}"
    help = "requests of one batch take each step together: batch them where the switch is fixed"
    node: str
    count: int
    outcomes: str


@dataclass(frozen=True)
class NotAModel(Diagnostic):
    title = "{node} denoises with `@{stage}`, which is none of the module's models"
    label = "models are {models}"
    help = "list the stages that denoise as `models` of the module, one or two, the first one first"
    node: str
    stage: str
    models: str


@dataclass(frozen=True)
class NotTwoModels(Diagnostic):
    title = "{node} has `models` {models}"
    label = "expected one model, or two different ones"
    help = "list the stages that denoise, the first one first"
    node: str
    models: str


@dataclass(frozen=True)
class NoObjective(Diagnostic):
    title = "{node} has `objective` {objective}"
    label = "expected {known}"
    help = "leave `objective` out where the bound is of the makespan"
    node: str
    objective: str
    known: str


@dataclass(frozen=True)
class SwitchUnsaid(Diagnostic):
    title = "{node} {reason}"
    label = "{remedy}"
    help = (
        "a segment says `switch` where an outcome changes which of its steps it takes, the same rule as the module's"
    )
    node: str
    reason: str
    remedy: str
