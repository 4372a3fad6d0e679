"""The stages of a layout, scheduled. In: a costed module whose layout names a schedule. Out: the scheduled module.

Every degree that divides a stage's ranks is planned, in the order of what it takes at least, unless that is more than
the shortest takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, cast, get_args

from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import Diagnostic, UserError
from arachnec.ir.nodes import Level, Module, quantity
from arachnec.planning.layout_bound import least_by_degree
from arachnec.planning.pipeline_orders import ScheduleName, stages_each
from arachnec.planning.pipeline_plan import Options, pipelined


@dataclass(frozen=True)
class UnknownSchedule(Diagnostic):
    title: ClassVar[str] = "there is no pipeline schedule `{name}`"
    help: ClassVar[str] = "leave `schedule` out of the module's attributes, or name one of `schedule-pipeline`"
    name: str


def scheduled_stages(module: Module, *, quick: bool = False) -> Module:
    """Its cascades have the ranks that the schedule chose as ``assigned``. Raises UserError where no degree fits.

    The search for an order is ``quick`` for every degree but the one that is taken.
    """
    name = str(module.attrs["schedule"])
    if name not in get_args(ScheduleName):
        raise UserError(UnknownSchedule(module.span, name))
    schedule = cast(ScheduleName, name)
    degree = shortest_degree(module, schedule) if stages_each(schedule, Options.v) == 1 else None
    placed = pipelined(module, Options(schedule, degree=degree, quick=quick))  # which says what does not fit
    cascades = (
        cascade.with_attrs(assigned=cascade.ranks, ranks=None, ulysses=None, ring=None) for cascade in placed.cascades
    )
    return replace(placed, level=Level.SCHEDULED, cascades=tuple(cascades))


def shortest_degree(module: Module, schedule: ScheduleName) -> int | None:
    """The degree of all stages with the shortest makespan; None where none fits."""
    best, least = None, math.inf
    bounds = least_by_degree(module, CostModel(module))
    for degree in sorted(bounds, key=lambda degree: bounds[degree]):
        if bounds[degree] >= least:
            break
        try:
            placed = pipelined(module, Options(schedule, degree=degree, quick=True))
        except UserError:
            continue
        if (makespan := quantity(placed.attrs["makespan"])) < least:
            best, least = degree, makespan
    return best
