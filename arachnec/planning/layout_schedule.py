"""The stages of a layout, scheduled. In: a costed module whose layout names a schedule. Out: the scheduled module.

Every degree that divides a stage's ranks is planned, in the order of what it takes at least, unless that is more than
the shortest takes.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast, get_args

from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.nodes import Level, Module, quantity
from arachnec.planning.layout_bound import least_by_degree
from arachnec.planning.pipeline_orders import ScheduleName, stages_each
from arachnec.planning.pipeline_plan import Options, pipelined
from arachnec.planning.replica_orders import DECODED, DECODED_QUICKLY


def scheduled_stages(module: Module, *, quick: bool = False, bounded: bool = True) -> Module:
    """Its cascades have the ranks that the schedule chose as ``assigned``. Raises UserError where no degree fits.

    Degrees are compared without a search for an order, which is then short where it is to be ``quick``. A plan that is
    only compared needs no bound on what any schedule takes: it is not ``bounded``.
    """
    name = str(module.attrs["schedule"])
    if name not in get_args(ScheduleName):
        raise user_error(
            f"there is no pipeline schedule `{name}`",
            help="leave `schedule` out of the module's attributes, or name one of `schedule-pipeline`",
            span=module.span,
        )
    schedule = cast(ScheduleName, name)
    cost, degree = CostModel(module), None
    if stages_each(schedule, Options.v) == 1:
        degree = shortest_degree(module, schedule, cost)
    options = Options(schedule, degree=degree, decoded=DECODED_QUICKLY if quick else DECODED)
    placed = pipelined(module, options, cost, bounded=bounded)  # which says what does not fit
    cascades = (
        cascade.with_attrs(assigned=cascade.ranks, ranks=None, ulysses=None, ring=None) for cascade in placed.cascades
    )
    return replace(placed, level=Level.SCHEDULED, cascades=tuple(cascades))


def shortest_degree(module: Module, schedule: ScheduleName, cost: CostModel) -> int | None:
    """The degree of all stages with the shortest makespan; None where none fits."""
    best, least = None, math.inf
    bounds = least_by_degree(module, cost)
    for degree in sorted(bounds, key=lambda degree: bounds[degree]):
        if bounds[degree] >= least:
            break
        try:
            placed = pipelined(module, Options(schedule, degree=degree, decoded=0), cost, bounded=False)
        except UserError:
            continue
        if (makespan := quantity(placed.attrs["makespan"])) < least:
            best, least = degree, makespan
    return best
