"""Errors of requests and of ``denoise`` cascades."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from arachnec.ir.diagnostic import Diagnostic


@dataclass(frozen=True)
class WrongSteps(Diagnostic):
    title: ClassVar[str] = "{node} has steps {steps}, {reason}"
    label: ClassVar[str] = "steps {steps}"
    help: ClassVar[str] = "`steps = [first, last]`, counted from 0: the last of a request of 50 is 49"
    node: str
    steps: str
    reason: str


@dataclass(frozen=True)
class WrongPlanned(Diagnostic):
    title: ClassVar[str] = "{node} is planned to take {planned} steps, and it has {count}"
    label: ClassVar[str] = "more than it has"
    help: ClassVar[str] = "write at most `planned = {count}`, or leave it out"
    node: str
    planned: int
    count: int


@dataclass(frozen=True)
class UnlikeRequest(Diagnostic):
    title: ClassVar[str] = "{node} has {what} = {value}, and its request {request} has {right}"
    label: ClassVar[str] = "not its request's"
    help: ClassVar[str] = "a batch holds requests of equal steps, branches and window, and says the same"
    node: str
    what: str
    value: str
    request: int
    right: str


@dataclass(frozen=True)
class WrongWindow(Diagnostic):
    title: ClassVar[str] = "clip {clip} has {what} {value}, {reason}"
    label: ClassVar[str] = "{what} {value}"
    help: ClassVar[str] = "`window = [least, most]`, 0 <= least <= forecast <= most <= steps"
    clip: int
    what: str
    value: str
    reason: str


@dataclass(frozen=True)
class UncertainBatch(Diagnostic):
    title: ClassVar[str] = "{node} holds {count} requests whose switches come when they come"
    label: ClassVar[str] = "{count} requests, outcomes {outcomes}"
    help: ClassVar[str] = "requests of one batch take each step together: batch them where the switch is fixed"
    node: str
    count: int
    outcomes: str


@dataclass(frozen=True)
class NotAModel(Diagnostic):
    title: ClassVar[str] = "{node} denoises with `@{stage}`, which is none of the module's models"
    label: ClassVar[str] = "models are {models}"
    help: ClassVar[str] = "list the stages that denoise as `models` of the module, one or two, the first one first"
    node: str
    stage: str
    models: str


@dataclass(frozen=True)
class NotTwoModels(Diagnostic):
    title: ClassVar[str] = "{node} has `models` {models}"
    label: ClassVar[str] = "expected one model, or two different ones"
    help: ClassVar[str] = "list the stages that denoise, the first one first"
    node: str
    models: str


@dataclass(frozen=True)
class NoObjective(Diagnostic):
    title: ClassVar[str] = "{node} has `objective` {objective}"
    label: ClassVar[str] = "expected {known}"
    help: ClassVar[str] = "leave `objective` out where the bound is of the makespan"
    node: str
    objective: str
    known: str


@dataclass(frozen=True)
class SwitchUnsaid(Diagnostic):
    title: ClassVar[str] = "{node} {reason}"
    label: ClassVar[str] = "{remedy}"
    help: ClassVar[str] = (
        "a segment says `switch` where an outcome changes which of its steps it takes, the same rule as the module's"
    )
    node: str
    reason: str
    remedy: str
