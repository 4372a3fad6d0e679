"""``schedule-stages``: the stages of a layout, in the order of the pipeline schedule that the layout names."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, cast, get_args

from arachnec.cost.model import CostModel
from arachnec.cost.table import Rows
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.nodes import Level, Module, quantity
from arachnec.passes.infra.base import CountFromZero, Pass
from arachnec.planning.layout_bound import least_by_degree
from arachnec.planning.pipeline_orders import DECODED, DECODED_QUICKLY, ScheduleName, stages_each
from arachnec.planning.pipeline_places import with_bound
from arachnec.planning.pipeline_plan import Options, pipelined


@dataclass(frozen=True)
class ScheduleStages(Pass):
    """Schedules the stages of a layout that `choose-layout` took, on ranks and in the order of the layout's schedule.

    Their degree is the one with the shortest makespan. With ``steps``, of whatever number, the search for an order is
    short. Cascades get the ranks that the schedule chose as ``assigned``.
    """

    needs: ClassVar[Level] = Level.COSTED
    gives: ClassVar[Level] = Level.SCHEDULED

    steps: CountFromZero | None = None

    def run(self, module: Module) -> Module:
        rows = Rows()
        return with_bound(self.run_for_comparison(module, rows), CostModel(module, rows))

    def run_for_comparison(self, module: Module, rows: Rows) -> Module:
        schedule, cost = schedule_of(module), CostModel(module, rows)
        degree = shortest_degree(module, schedule, cost) if stages_each(schedule, Options.v) == 1 else None
        options = Options(schedule, degree=degree, decoded=DECODED if self.steps is None else DECODED_QUICKLY)
        placed = pipelined(module, options, cost)  # which says what does not fit
        cascades = (
            cascade.with_attrs(assigned=cascade.ranks, ranks=None, ulysses=None, ring=None)
            for cascade in placed.cascades
        )
        return replace(placed, level=Level.SCHEDULED, cascades=tuple(cascades))


def schedule_of(module: Module) -> ScheduleName:
    """The pipeline schedule that the layout names. Raises UserError where there is none of that name."""
    if "schedule" not in module.attrs:
        raise user_error(
            "the module's layout has no stages to schedule",
            help="use `schedule-z3`, or `schedule-pipeline` for stages that `stages` made",
            span=module.span,
        )
    name = str(module.attrs["schedule"])
    if name not in get_args(ScheduleName):
        raise user_error(
            f"there is no pipeline schedule `{name}`",
            help="leave `schedule` out of the module's attributes, or name one of `schedule-pipeline`",
            span=module.span,
        )
    return cast(ScheduleName, name)


def shortest_degree(module: Module, schedule: ScheduleName, cost: CostModel) -> int | None:
    """The degree of all stages with the shortest makespan, without a search for an order; None where none fits. One
    that takes longer at least than the shortest so far is not planned."""
    best, least = None, math.inf
    bounds = least_by_degree(module, cost)
    for degree in sorted(bounds, key=lambda degree: bounds[degree]):
        if bounds[degree] >= least:
            break
        try:
            placed = pipelined(module, Options(schedule, degree=degree, decoded=0), cost)
        except UserError:
            continue
        if (makespan := quantity(placed.attrs["makespan"])) < least:
            best, least = degree, makespan
    return best
