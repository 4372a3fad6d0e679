"""What can be wrong with a pipeline that is asked for: its degrees, its cells, its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from arachnec.ir.diagnostic import Diagnostic


@dataclass(frozen=True)
class NoStages(Diagnostic):
    title: ClassVar[str] = "the module has no pipeline to schedule"
    help: ClassVar[str] = "put `stages{{p=4}}` before `partition`"


@dataclass(frozen=True)
class OptionOfAnotherSchedule(Diagnostic):
    title: ClassVar[str] = "`{option}` is an option of `{schedule}`, and the schedule is `{given}`"
    label: ClassVar[str] = "in these options"
    help: ClassVar[str] = "leave `{option}` out, or give `schedule={schedule}`"
    option: str
    schedule: str
    given: str


@dataclass(frozen=True)
class OptionBesideOrders(Diagnostic):
    title: ClassVar[str] = "`{option}` stands beside `orders`, whose file says what every rank does"
    label: ClassVar[str] = "in these options"
    help: ClassVar[str] = "leave `{option}` out, or `orders`"
    option: str


@dataclass(frozen=True)
class DegreeDoesNotDivide(Diagnostic):
    title: ClassVar[str] = "degree {degree} does not divide the {ranks} ranks of each stage"
    help: ClassVar[str] = "give a degree that divides {ranks}, or leave it out"
    degree: int
    ranks: int


@dataclass(frozen=True)
class DegreesForOtherStages(Diagnostic):
    title: ClassVar[str] = "degrees {degrees} do not fit {stages} stages on {world} ranks"
    help: ClassVar[str] = (
        "give one degree for each stage, their sum dividing {world}, and a schedule with one stage on a rank"
    )
    degrees: list[int]
    stages: int
    world: int


@dataclass(frozen=True)
class CellDoesNotDivide(Diagnostic):
    title: ClassVar[str] = "cells of {cell} ranks do not divide the {ranks} ranks of each stage, {degree} a micro-batch"
    help: ClassVar[str] = "give `shard-parameters` a cell that divides {ranks}, and a degree that it divides"
    cell: int
    ranks: int
    degree: int


@dataclass(frozen=True)
class DegreeNotListed(Diagnostic):
    title: ClassVar[str] = "a micro-batch cannot run on {degree} ranks of @{stage}"
    help: ClassVar[str] = "this stage runs on {listed}: give one of these that divides its ranks, or leave it out"
    degree: int
    stage: str
    listed: str


@dataclass(frozen=True)
class PipelineDoesNotFit(Diagnostic):
    title: ClassVar[str] = (
        "schedule `{schedule}` needs {needed:.4g} GiB on the ranks of @{stage}, their devices have {memory:.4g}"
    )
    help: ClassVar[str] = (
        "use more stages or ranks, a schedule that holds fewer micro-batches, or `partition{{tokens=...}}` with fewer "
        "tokens in each{more}"
    )
    schedule: str
    needed: float
    stage: str
    memory: float
    more: str = ""


@dataclass(frozen=True)
class GroupDoesNotFit(Diagnostic):
    title: ClassVar[str] = "groups of {k} micro-batches need {needed:.4g} GiB on a rank, devices have {memory:.4g}"
    help: ClassVar[str] = "give `kfkb` a k of at most {most}, or none: then it is chosen"
    k: int
    needed: float
    memory: float
    most: int


@dataclass(frozen=True)
class GroupLargerThanBatch(Diagnostic):
    title: ClassVar[str] = "groups of {k} micro-batches, and no replica of the pipeline has more than {most}"
    help: ClassVar[str] = "give `kfkb` a k of at most {most}, or none: then it is chosen"
    k: int
    most: int
