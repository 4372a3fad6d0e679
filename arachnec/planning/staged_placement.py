"""Ranks for the cascades of a pipeline, whose stages have a place: their parameters lie there and nowhere else.

A forward takes ranks of its stage's place. Its backward and its weight gradients run on the same ranks in the same
order, because what it saved lies there. Every rank keeps the order of the schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from arachnec.cost.memory import stages_apart
from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import Diagnostic, UserError, counted, user_error
from arachnec.ir.nodes import Cascade, Module, Phase, integers
from arachnec.lowering.order import reads_saved
from arachnec.planning.placed_cascade import on
from arachnec.planning.placement import in_order, place_among
from arachnec.planning.rank_choice import pick_ranks

PIPELINED = (Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT)


@dataclass(frozen=True)
class PlaceTooSmall(Diagnostic):
    title = "%{cascade} takes {degree} ranks, and stage @{stage} lies on {ranks}"
    label = "does not fit its stage's place"
    help = "use a lower degree, fewer stages, or give `reduce @{stage}` more `ranks`"
    cascade: str
    degree: int
    stage: str
    ranks: str


def is_pipeline(module: Module) -> bool:
    """Whether some trained stage runs forward and backward as cascades of their own."""
    trained = {stage.name for stage in module.stages if stage.trained}
    return any(cascade.phase in PIPELINED and cascade.stage in trained for cascade in module.cascades)


def stage_places(module: Module) -> dict[str, tuple[int, ...]]:
    """The ranks of every stage: those that its reduce states; else runs of ranks in the order of the stages."""
    assert module.cluster is not None
    world = module.cluster.world
    apart = stages_apart(module)
    stages = [stage.name for stage in module.stages if stage.name in apart]
    stated = {node.stage: integers(node.attrs["ranks"]) for node in module.reductions if "ranks" in node.attrs}
    places = {stage.name: tuple(range(world)) for stage in module.stages}
    for number, name in enumerate(stages):
        first = number * world // len(stages)
        places[name] = tuple(range(first, max(first + 1, (number + 1) * world // len(stages))))
    return places | {name: ranks for name, ranks in stated.items() if name in apart}


def staged_placements(
    cascades: Sequence[Cascade], cost: CostModel, places: Mapping[str, tuple[int, ...]]
) -> list[Cascade]:
    """Every cascade with its ranks, as early as its inputs, their handoffs and its ranks allow."""
    free = [0.0] * cost.cluster.world
    done: dict[str, Cascade] = {}
    for cascade in in_order(cascades):
        inputs = [done[name] for name in cascade.inputs if name in done]
        saved = next((source for source in inputs if reads_saved(cascade, source)), None)
        if saved is not None and cascade.width != saved.width:
            ranks, others = (counted(one.width, "rank") for one in (cascade, saved))
            raise user_error(
                f"%{cascade.name} takes {ranks}, and %{saved.name}, whose saved values it reads, {others}",
                label="runs where they lie",
                help="give both the same `degree` and `side`",
                span=cascade.span,
            )
        if "assigned" in cascade.attrs:
            placed = on(cascade.with_attrs(assigned=None), integers(cascade.attrs["assigned"]), inputs, free, cost)
        elif saved is not None:
            placed = on(cascade, saved.ranks, inputs, free, cost)
        else:
            place = places[cascade.stage]
            if len(place) < cascade.degree:
                ranks = counted(len(place), "rank")
                raise UserError(PlaceTooSmall(cascade.span, cascade.name, cascade.degree, cascade.stage, ranks))
            placed = place_among(cascade, place, inputs, free, cost, pick_ranks)
        done[cascade.name] = placed
        for rank in placed.ranks:
            free[rank] = placed.end
    return list(done.values())
