"""What can be wrong with a pipeline that is asked for: its degrees, its cells, its memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from arachnec.ir.diagnostic import Diagnostic


@dataclass(frozen=True)
class NoStages(Diagnostic):
    title = "the module has no pipeline to schedule"
    help = "put `stages{{p=4}}` before `partition`"


@dataclass(frozen=True)
class OptionOfAnotherSchedule(Diagnostic):
    title = "`{option}` is an option of `{schedule}`, and the schedule is `{given}`"
    label = "in these options"
    help = "leave `{option}` out, or give `schedule={schedule}`"
    option: str
    schedule: str
    given: str


@dataclass(frozen=True)
class OptionBesideOrders(Diagnostic):
    title = "`{option}` stands beside `orders`, whose file says what every rank does"
    label = "in these options"
    help = "leave `{option}` out, or `orders`"
    option: str


@dataclass(frozen=True)
class DegreeDoesNotDivide(Diagnostic):
    title = "degree {degree} does not divide the {ranks} ranks of each stage"
    help = "give a degree that divides {ranks}, or leave it out"
    degree: int
    ranks: int


@dataclass(frozen=True)
class DegreesForOtherStages(Diagnostic):
    title = "degrees {degrees} do not fit {stages} stages on {world} ranks"
    help = (
        "give one degree for each stage, their sum dividing {world}, and a schedule with one stage on a rank"
    )
    degrees: list[int]
    stages: int
    world: int


@dataclass(frozen=True)
class CellDoesNotDivide(Diagnostic):
    title = "cells of {cell} ranks do not divide the {ranks} ranks of each stage, {degree} a micro-batch"
    help = "give `shard-parameters` a cell that divides {ranks}, and a degree that it divides"
    cell: int
    ranks: int
    degree: int


@dataclass(frozen=True)
class DegreeNotListed(Diagnostic):
    title = "a micro-batch cannot run on {degree} ranks of @{stage}"
    help = "this stage runs on {listed}: give one of these that divides its ranks, or leave it out"
    degree: int
    stage: str
    listed: str


@dataclass(frozen=True)
class PipelineDoesNotFit(Diagnostic):
    title = (
        "schedule `{schedule}` needs {needed:.4g} GiB on the ranks of @{stage}, their devices have {memory:.4g}"
    )
    help = (
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
    title = "groups of {k} micro-batches need {needed:.4g} GiB on a rank, devices have {memory:.4g}"
    help = "give `kfkb` a k of at most {most}, or none: then it is chosen"
    k: int
    needed: float
    memory: float
    most: int


@dataclass(frozen=True)
class GroupLargerThanBatch(Diagnostic):
    title = "groups of {k} micro-batches, and no replica of the pipeline has more than {most}"
    help = "give `kfkb` a k of at most {most}, or none: then it is chosen"
    k: int
    most: int
