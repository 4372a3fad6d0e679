"""Where the stages of a pipeline lie, the ranks of their cascades, and the module that they make.

Without a planner's ``place`` on the stages the ranks are cut into as many equal runs as a pipeline has ranks. A *lane*
is one group of ranks, as many as a cascade's degree, its micro-batches and its order. With equal runs every replica of
the pipeline has a lane in each of them. With unequal ones micro-batches go round: each stage's groups take turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations, pairwise
from math import gcd

from arachnec.cost.memory import stages_apart
from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import UserError, counted, user_error
from arachnec.ir.nodes import Cascade, Level, Module, Phase, Reduce, Stage, Step, integers, quantity
from arachnec.ir.stage_sizes import shape_of
from arachnec.ir.values import Attributes, Quantity
from arachnec.lowering.order import reads_saved
from arachnec.pipelining.action import Order, PipelineSchedule
from arachnec.planning import lower_bounds
from arachnec.planning.cascade_ranks import on, pick_ranks, placed_in_turn
from arachnec.planning.formulate import has_gradient, problem_of
from arachnec.planning.pipeline_orders import ScheduleName, pipeline_ranks
from arachnec.planning.placement import in_order, place_among
from arachnec.solver.problem import TICKS

Ranks = tuple[int, ...]


def ranks_do_not_divide_error(world: int, ranks: int) -> UserError:
    return user_error(
        f"{world} ranks cannot hold pipelines of {ranks} ranks evenly",
        help=f"choose stages so that a pipeline's ranks divide {world}",
    )


@dataclass(frozen=True)
class Places:
    """``runs``: ranks that hold the same stages. ``placement``: the run of every stage."""

    runs: tuple[Ranks, ...]
    placement: tuple[int, ...]

    @property
    def equal(self) -> bool:
        return len({len(run) for run in self.runs}) == 1

    @property
    def most_degree(self) -> int:
        """The degrees of a pipeline divide it."""
        return gcd(*map(len, self.runs))

    def replicas(self, widths: Sequence[int]) -> int | None:
        """How many pipelines lie side by side that take so many ranks of every run; None where runs hold unequal
        numbers."""
        counts = {len(run) // width for run, width in zip(self.runs, widths, strict=True)}
        return counts.pop() if len(counts) == 1 else None

    def of(self, stage: int) -> Ranks:
        return self.runs[self.placement[stage]]


@dataclass(frozen=True)
class MicroBatch:
    """The cascades of one micro-batch by stage and phase. Those of one ``kind`` cost the same."""

    encoders: tuple[Cascade, ...]
    cascades: Mapping[tuple[int, Phase], Cascade]
    kind: int


def micro_batches(module: Module, parts: Sequence[Stage]) -> list[MicroBatch]:
    """What belongs together, in the order in which it stands in the module."""
    number = {part.name: index for index, part in enumerate(parts)}
    named = {cascade.name: cascade for cascade in module.cascades}
    batches: dict[tuple[int, ...], dict[tuple[int, Phase], Cascade]] = {}
    for cascade in module.cascades:
        if cascade.stage in number:
            batches.setdefault(cascade.clips, {})[number[cascade.stage], cascade.phase] = cascade
    kinds: dict[object, int] = {}

    def costs(cascade: Cascade) -> tuple[object, ...]:
        return shape_of(cascade), *(shape_of(named[name]) for name in cascade.inputs if name in named)

    def micro_batch(of: Mapping[tuple[int, Phase], Cascade]) -> MicroBatch:
        encoders = tuple(named[n] for n in of[0, Phase.FORWARD].inputs if named[n].phase is Phase.ENCODE)
        kind = tuple((key, costs(cascade)) for key, cascade in of.items())
        return MicroBatch(encoders, of, kinds.setdefault(kind, len(kinds)))

    return [micro_batch(of) for of in batches.values()]


@dataclass(frozen=True)
class Lane:
    """``batches`` by the numbers of the ``order``; ``encodes``: those whose encoders it runs, ``ahead`` of actions."""

    ranks: Ranks
    run: int
    batches: Sequence[MicroBatch]
    order: Order
    encodes: Sequence[int]
    ahead: int


def places_of(
    parts: Sequence[Stage], schedule: ScheduleName, v: int, world: int, given: PipelineSchedule | None = None
) -> Places:
    """Where the planner of stages put them, else equal runs. Raises UserError for places no pipeline can have.

    ``given`` are orders that somebody wrote: they say which stages a rank has.
    """
    stated = [_stated(part, world) for part in parts if "place" in part.attrs]
    name = schedule if given is None else "orders"
    if stated:
        places = _planned(parts, stated)
        if not places.equal and name != "dapple":
            raise user_error(
                f"the stages lie on {[len(place) for place in stated]} ranks, and schedule `{name}` wants the same "
                "number for all",
                help="use `schedule=dapple`, whose replicas of a stage take turns, or places of equal size",
            )
        if name == "planned":
            return places
    ranks = pipeline_ranks(schedule, len(parts), v) if given is None else len(given.orders)
    placement = _placement(schedule, len(parts), ranks) if given is None else given.placement
    if stated:
        if placement != places.placement:
            raise user_error(
                f"schedule `{name}` puts the stages on the pipeline's ranks {list(placement)}, they lie on "
                f"{list(places.placement)}",
                help="use `schedule=planned`, which takes stages where they lie",
            )
        return places
    if ranks > world or world % ranks:
        raise ranks_do_not_divide_error(world, ranks)
    size = world // ranks
    runs = tuple(tuple(range(first, first + size)) for first in range(0, world, size))
    return Places(runs, placement)


def runs_of(degrees: Sequence[int], world: int) -> Places:
    """A run for each stage, as many times its degree as there is room for."""
    count = world // sum(degrees)
    ends = [0, *accumulate(count * degree for degree in degrees)]
    return Places(tuple(tuple(range(a, b)) for a, b in pairwise(ends)), tuple(range(len(degrees))))


def _stated(part: Stage, world: int) -> Ranks:
    place = integers(part.attrs["place"])
    if not place or len(set(place)) < len(place) or not set(place) <= set(range(world)):
        raise user_error(
            f"{list(place)} is no place for stage @{part.name}",
            label="its `place`",
            help=f"give it some of the ranks 0 to {world - 1}, each once",
            span=part.span,
        )
    return place


def _planned(parts: Sequence[Stage], stated: Sequence[Ranks]) -> Places:
    if len(stated) < len(parts):
        bare = next(part for part in parts if "place" not in part.attrs)
        raise user_error(
            f"stage @{bare.name} has no `place`, and others have",
            label="lies nowhere",
            help="give every stage of the pipeline a `place`, or none",
            span=bare.span,
        )
    for (a, one), (b, other) in combinations(zip(parts, stated, strict=True), 2):
        common = sorted(set(one) & set(other))
        if common and one != other:
            raise user_error(
                f"rank {common[0]} holds @{b.name} and @{a.name}, whose places differ otherwise",
                label="shares a part of its ranks",
                help="two stages of a pipeline have the same `place`, or no rank in common",
                span=b.span,
            )
    runs = tuple(dict.fromkeys(stated))
    return Places(runs, tuple(runs.index(place) for place in stated))


def _placement(schedule: ScheduleName, stages: int, ranks: int) -> tuple[int, ...]:
    """The rank of every stage by a schedule's rule: in turn, or there and back."""
    if schedule == "zb-v":
        return (*range(ranks), *range(ranks)[::-1])
    return tuple(stage % ranks for stage in range(stages))


def replica_lanes(
    places: Places,
    widths: Sequence[int],
    replicas: Sequence[Sequence[MicroBatch]],
    orders: Sequence[PipelineSchedule],
) -> list[Lane]:
    """Of runs that hold as many groups: replica i is the i-th group of every run, of so many ranks.

    The first round of micro-batches is encoded at once, by the last ranks first, which wait for their stage's input
    longest; a later one a round ahead of its forward.
    """
    ranks = len(places.runs)
    return [
        Lane(
            places.runs[run][replica * widths[run] : (replica + 1) * widths[run]],
            run,
            batches,
            order,
            range(ranks - 1 - run, len(batches), ranks),
            ranks,
        )
        for replica, (batches, schedule) in enumerate(zip(replicas, orders, strict=True))
        for run, order in enumerate(schedule.orders)
    ]


def lanes_in_turns(
    places: Places, degree: int, batches: Sequence[MicroBatch], orders: Sequence[Sequence[Order]]
) -> list[Lane]:
    """Of unequal runs, one stage on each: ``orders[stage][group]``. Encoders are dealt out over all groups."""
    groups = [(stage, group) for stage, own in enumerate(orders) for group in range(len(own))][::-1]
    return [
        Lane(
            places.of(stage)[group * degree : (group + 1) * degree],
            places.placement[stage],
            batches,
            orders[stage][group],
            range(number, len(batches), len(groups)),
            len(groups),
        )
        for number, (stage, group) in enumerate(groups)
    ]


PIPELINED = (Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT)


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
    """Every cascade with its ranks, as early as its inputs, their handoffs and its ranks allow.

    A forward takes ranks of its stage's place. Its backward and its weight gradients run on the same ranks in the same
    order, because what it saved lies there. Every rank keeps the order of the schedule.
    """

    def placed(cascade: Cascade, inputs: Sequence[Cascade], free: Sequence[float]) -> Cascade:
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
            return on(cascade.with_attrs(assigned=None), integers(cascade.attrs["assigned"]), inputs, free, cost)
        if saved is not None:
            return on(cascade, saved.ranks, inputs, free, cost)
        place = places[cascade.stage]
        if len(place) < cascade.degree:
            there = f"stage @{cascade.stage} lies on {counted(len(place), 'rank')}"
            raise user_error(
                f"%{cascade.name} takes {cascade.degree} ranks, and {there}",
                label="does not fit its stage's place",
                help=f"use a lower degree, fewer stages, or give `reduce @{cascade.stage}` more `ranks`",
                span=cascade.span,
            )
        return place_among(cascade, place, inputs, free, cost, pick_ranks)

    return placed_in_turn(in_order(cascades), cost, placed)


def cell_does_not_divide_error(cell: int, ranks: int, degree: int) -> UserError:
    return user_error(
        f"cells of {cell} ranks do not divide the {ranks} ranks of each stage, {degree} a micro-batch",
        help=f"give `shard-parameters` a cell that divides {ranks}, and a degree that it divides",
    )


def with_bound(plan: Module, cost: CostModel) -> Module:
    """A plan of the module of ``cost`` with the bound: before that no schedule of any kind ends."""
    problem = problem_of(cost.module, cost)
    bound = max(0, lower_bounds.bound_of(cost.module, cost, problem) - len(problem.jobs)) / TICKS
    bound_ms = Quantity(min(quantity(plan.attrs["makespan"]), bound), "ms")
    return replace(plan, attrs=plan.attrs.updated(bound=bound_ms))


def at_level_placed(module: Module, cascades: Sequence[Cascade], places: Mapping[str, tuple[int, ...]]) -> Module:
    """``places`` are the ranks of every trained stage. 0 ms stand as the bound (``with_bound``)."""
    trained = [stage.name for stage in module.stages if stage.trained]
    readers: dict[str, list[str]] = {name: [] for name in trained}
    for cascade in cascades:
        if cascade.stage in readers and has_gradient(cascade):
            readers[cascade.stage].append(cascade.name)
    makespan = max(cascade.end for cascade in cascades)
    return replace(
        module,
        level=Level.PLACED,
        cascades=tuple(cascades),
        reductions=tuple(Reduce(name, tuple(readers[name]), Attributes.of(ranks=places[name])) for name in trained),
        steps=tuple(Step(name) for name in trained),
        attrs=module.attrs.updated(makespan=Quantity(makespan, "ms"), bound=Quantity(0.0, "ms"), proved=False),
    )
