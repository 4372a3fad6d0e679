"""Stages on ranks, and the times of a pipeline. In: a costed module in stages and a schedule. Out: the placed module.

The ranks are cut into as many runs as a pipeline has ranks: one run holds one stage, or a few, for all replicas. So
gradients are all-reduced within a run, and only activations cross from run to run. Micro-batches are dealt out over the
replicas, longest first, each to the one with the least work so far.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import floor
from pathlib import Path

from arachnec.cluster.topology import handoff_time, machine_of
from arachnec.cost.memory import GIB
from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.nodes import Cascade, Module, Phase, Stage, integer, integers, quantity
from arachnec.ir.parameter_cells import cell_of, whole_cells
from arachnec.ir.stage_sizes import block_count, gib
from arachnec.pipelining.action import (
    ACTIVATION_GRADIENT,
    FORWARD,
    WEIGHT_GRADIENT,
    Action,
    PipelineSchedule,
)
from arachnec.pipelining.csv_format import read_csv
from arachnec.pipelining.evaluate import StageTimes, Table, held
from arachnec.pipelining.schedules import WarmUp, dapple, dapple_in_turns, kfkb
from arachnec.planning.cascade_ranks import on
from arachnec.planning.formulate import LacksMemory, decided
from arachnec.planning.handoff_memory import overflow
from arachnec.planning.pipeline_orders import (
    DECODED,
    Replica,
    ScheduleName,
    exceeds_alone,
    group_size,
    orders_of,
    pipeline_ranks,
    planned_order,
)
from arachnec.planning.pipeline_places import (
    Lane,
    MicroBatch,
    Places,
    at_level_placed,
    cell_does_not_divide_error,
    lanes_in_turns,
    micro_batches,
    places_of,
    replica_lanes,
    runs_of,
)

ATTEMPTS = 4  # to leave enough memory free for what waits
ADAPTING = frozenset({"dapple", "planned"})  # hold as many micro-batches as the memory lets them


@dataclass(frozen=True)
class Options:
    """What a pipeline is asked for. ``degree`` None: the least that fits; ``recompute`` None: where that is faster.

    ``degree`` ranks run a micro-batch on every stage, or ``degrees`` on each. Where parameters are dealt out over cells
    they are whole cells, on which as many clips run side by side as can.
    """

    schedule: ScheduleName
    k: int | None = None
    v: int = 2
    degree: int | None = None
    recompute: bool | None = None
    policy: WarmUp = "A"
    orders: str | None = None  # a file of torch's pipelining, instead of a schedule
    degrees: tuple[int, ...] | None = None
    decoded: int = DECODED  # actions in the orders that are looked at; less for a comparison


def pipelined(module: Module, options: Options, cost: CostModel) -> Module:
    """The module at level placed, scheduled by ``options``. Raises UserError where that fits no memory.

    ``cost`` is the module's own. 0 ms stand as the bound of all schedules.

    What was handed on and waits to be read is known once everything is placed. Where there is too much of it, so much
    memory is left free for it, and all is chosen again.
    """
    waiting = 0.0
    for _ in range(ATTEMPTS):
        placed, needed = _chosen(module, cost, options, waiting)
        over = overflow(placed, needed, cost)
        if over <= 0:
            break
        waiting += over
    return placed


def _chosen(module: Module, cost: CostModel, options: Options, waiting: float) -> tuple[Module, float]:
    """The shortest plan, so many GiB left free on every rank for what waits; and the GiB that it needs beside that."""
    parts = [stage for stage in module.stages if "part_of" in stage.attrs]
    if not parts:
        raise user_error("the module has no pipeline to schedule", help="put `stages{p=4}` before `partition`")
    given = None if options.orders is None else read_csv(Path(options.orders), len(parts))
    places, widths = _layouts(options, parts, cost.cluster.world, given)
    batches = micro_batches(module, parts)
    most = max(block_count(part) for part in parts)
    ways = (0, most) if options.recompute is None else (most if options.recompute else 0,)
    plans = [_Plan(module, cost, parts, batches, options, places, w, r, waiting) for w in widths for r in ways]
    fitting = {r: next((plan for plan in plans if plan.recompute == r and plan.fits), None) for r in ways}
    offered = [plan for plan in fitting.values() if plan is not None]
    if options.recompute is None:
        # where the schedule runs fewer ahead to fit, recomputing more may let it run more ahead
        further = offered if options.schedule in ADAPTING else []
        offered = [*(fewest_blocks(plan) for plan in offered), *further]
    if options.k is not None:
        demand_batch(options.k, module, plans)
        if not offered:
            demand_group(options.k, plans)
    if not offered:
        least = min(plans, key=lambda plan: max(plan.needed))
        worst = max(range(len(places.runs)), key=lambda run: least.needed[run])
        stage = parts[least.stages_on[worst][0]].name
        needs = f"{least.needed[worst] + waiting:.4g} GiB on the ranks of @{stage}"
        title = f"schedule `{options.schedule}` needs {needs}, their devices have {limit_of(cost):.4g}"
        remedy = "`partition{tokens=...}` with fewer tokens in each"
        remedy = f"use more stages or ranks, a schedule that holds fewer micro-batches, or {remedy}"
        raise UserError(LacksMemory(None, title, help=remedy))
    lies_on = {part.name: places.of(stage) for stage, part in enumerate(parts)}
    placed = [(at_level_placed(module, plan.placed(), lies_on), plan.grouping, max(plan.needed)) for plan in offered]
    shortest, grouping, needed = min(placed, key=lambda one: quantity(one[0].attrs["makespan"]))
    return replace(shortest, attrs=shortest.attrs.updated(grouping=grouping)), needed


def demand_batch(k: int, module: Module, plans: Sequence[_Plan]) -> None:
    """Raises UserError where no replica has so many in the first iteration; a later one may have fewer."""
    most = max(len(batches) for plan in plans for batches in plan.replicas)
    if k > most and not any(integer(clip.attrs.get("iteration", 0)) for clip in module.clips):
        raise user_error(
            f"groups of {k} micro-batches, and no replica of the pipeline has more than {most}",
            help=f"give `kfkb` a k of at most {most}, or none: then it is chosen",
        )


def demand_group(k: int, plans: Sequence[_Plan]) -> None:
    """Raises UserError where a smaller k would fit."""
    for smaller in range(k - 1, 0, -1):
        lower = (replace(plan, options=replace(plan.options, k=smaller)) for plan in plans)
        if any(plan.fits for plan in lower):
            needed = min(max(plan.needed) + plan.waiting for plan in plans)
            raise user_error(
                f"groups of {k} micro-batches need {needed:.4g} GiB on a rank, devices have "
                f"{limit_of(plans[0].cost):.4g}",
                help=f"give `kfkb` a k of at most {smaller}, or none: then it is chosen",
            )


def _layouts(
    options: Options, parts: Sequence[Stage], world: int, given: PipelineSchedule | None
) -> tuple[Places, list[tuple[int, ...]]]:
    """Where the stages lie, and on how many ranks of each run a micro-batch may run, the least first."""
    cell = max(cell_of(part) or 1 for part in parts)
    if (degrees := options.degrees) is not None:
        ranks = pipeline_ranks(options.schedule, len(parts), options.v)
        if len(degrees) != len(parts) or ranks != len(parts) or min(degrees) < 1 or world % sum(degrees):
            raise user_error(
                f"degrees {list(degrees)} do not fit {len(parts)} stages on {world} ranks",
                help=(
                    f"give one degree for each stage, their sum dividing {world}, and a schedule with one stage on a "
                    "rank"
                ),
            )
        if any(degree % cell for degree in degrees):
            raise cell_does_not_divide_error(cell, world // sum(degrees) * min(degrees), min(degrees))
        _demand_listed(parts, degrees)
        return runs_of(degrees, world), [degrees]
    places = places_of(parts, options.schedule, options.v, world, given)
    most = places.most_degree
    if options.degree is not None and (options.degree < 1 or most % options.degree):
        raise user_error(
            f"degree {options.degree} does not divide the {most} ranks of each stage",
            help=f"give a degree that divides {most}, or leave it out",
        )
    if (options.degree or cell) % cell or not all(whole_cells(run, cell) for run in places.runs):
        raise cell_does_not_divide_error(cell, most, options.degree or most)
    if options.degree is not None:
        _demand_listed(parts, [options.degree] * len(parts))
        return places, [(options.degree,) * len(places.runs)]
    dividing = [degree for degree in range(cell, most + 1, cell) if most % degree == 0]
    listed = [degree for degree in dividing if all(_lists(part, degree) for part in parts)]
    if not listed:
        _demand_listed(parts, dividing[:1] * len(parts))
    return places, [(degree,) * len(places.runs) for degree in listed]


def _demand_listed(parts: Sequence[Stage], degrees: Sequence[int]) -> None:
    """Raises UserError where a stage lists its degrees, and not this one."""
    for part, degree in zip(parts, degrees, strict=True):
        if not _lists(part, degree):
            listed = ", ".join(map(str, integers(part.attrs["degrees"])))
            raise user_error(
                f"a micro-batch cannot run on {degree} ranks of @{part.name}",
                help=f"this stage runs on {listed}: give one of these that divides its ranks, or leave it out",
            )


def _lists(part: Stage, degree: int) -> bool:
    listed = part.attrs.get("degrees")
    return listed is None or degree in integers(listed)


def fewest_blocks(plan: _Plan) -> _Plan:
    """The plan with as few blocks recomputed as fit; it fits."""
    counts = range(1, plan.recompute)
    first = bisect_left(counts, True, key=lambda count: replace(plan, recompute=count).fits)
    return replace(plan, recompute=counts[first]) if first < len(counts) else plan


@dataclass(frozen=True)
class _Plan:
    """Ranks for a micro-batch on each rank of a pipeline, and a number of blocks that every stage recomputes, or all
    where it has fewer."""

    module: Module
    cost: CostModel
    parts: Sequence[Stage]
    batches: Sequence[MicroBatch]
    options: Options
    places: Places
    widths: tuple[int, ...]
    recompute: int
    waiting: float  # GiB left free on every rank for what waits to be read

    def _width(self, stage: str) -> int:
        """Ranks that run a micro-batch on a stage."""
        if len(set(self.widths)) == 1:
            return self.widths[0]
        return self.widths[self.places.placement[self._numbers[stage]]]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {part.name: number for number, part in enumerate(self.parts)}

    @cached_property
    def lanes(self) -> list[Lane]:
        if self.places.replicas(self.widths) is not None:
            return replica_lanes(self.places, self.widths, self.replicas, self.orders)
        degree = self.widths[0]
        counts = [len(self.places.of(stage)) // degree for stage in range(len(self.parts))]
        batches = sorted(self.batches, key=self._work, reverse=True)
        orders = dapple_in_turns(counts, len(batches), self.options.policy, self._most_held(batches))
        return lanes_in_turns(self.places, degree, batches, orders)

    @cached_property
    def replicas(self) -> list[list[MicroBatch]]:
        """The micro-batches of each replica of the pipeline, longest first."""
        count = len(self.places.runs[0]) // self.widths[0]
        loads, dealt = [0.0] * count, [list[MicroBatch]() for _ in range(count)]
        for batch in sorted(self.batches, key=self._work, reverse=True):
            replica = min(range(count), key=lambda own: loads[own] + self._work(batch, own))
            loads[replica] += self._work(batch, replica)
            dealt[replica].append(batch)
        return dealt

    def _blocks(self, cascade: Cascade) -> int:
        return min(self.recompute, self.cost.blocks(cascade))

    def _side(self, cascade: Cascade) -> int:
        """Clips side by side: as many as all stages can."""
        key = cascade.batch, cascade.tokens
        if key not in self._sides:
            on_stages = [replace(cascade, stage=part.name) for part in self.parts]
            possible = (frozenset(self.cost.sides(one, self._width(one.stage))) for one in on_stages)
            self._sides[key] = max(frozenset.intersection(*possible), default=1)
        return self._sides[key]

    @cached_property
    def _sides(self) -> dict[tuple[int, int], int]:
        return {}

    def _work(self, batch: MicroBatch, replica: int = 0) -> float:
        alike = self._alike[replica]
        if (batch.kind, alike) not in self._works:
            self._works[batch.kind, alike] = sum(self._time(cascade, alike) for cascade in batch.cascades.values())
        return self._works[batch.kind, alike]

    @cached_property
    def _works(self) -> dict[tuple[int, int], float]:
        return {}

    @cached_property
    def _alike(self) -> list[int]:
        """For every replica the first whose ranks are devices of the same kinds."""
        count, cluster = len(self.places.runs[0]) // self.widths[0], self.cost.cluster
        if not self.cost.devices.kinds:
            return [0] * count
        groups = ([self._group(stage, own) for stage in range(len(self.parts))] for own in range(count))
        machines = [tuple(machine_of(cluster, rank) for group in own for rank in group) for own in groups]
        return [machines.index(own) for own in machines]

    def _group(self, stage: int, replica: int) -> tuple[int, ...]:
        """The ranks of a stage in a replica."""
        width = self.widths[self.places.placement[stage]]
        return self.places.of(stage)[replica * width : (replica + 1) * width]

    def _time(self, cascade: Cascade, replica: int) -> float:
        """ms on the ranks of a replica; where devices are equal on any."""
        width, side = self._width(cascade.stage), self._side(cascade)
        ranks = self._group(self._numbers[cascade.stage], replica) if self.cost.devices.kinds else None
        return self.cost.time(cascade, width, ranks=ranks, recompute=self._blocks(cascade), side=side)

    @property
    def grouping(self) -> int | None:
        """The largest k of the replicas, where the links choose it."""
        if self.options.schedule != "kfkb" or self.options.k is not None or self.options.orders is not None:
            return None
        return max(group_size(self._replica(own, number), None) for number, own in enumerate(self.replicas) if own)

    @cached_property
    def orders(self) -> list[PipelineSchedule]:
        """Of every replica; one without micro-batches has none."""
        by_kinds: dict[tuple[int, ...], PipelineSchedule] = {}
        orders = []
        for replica, batches in enumerate(self.replicas):
            kinds = self._alike[replica], *(batch.kind for batch in batches)
            if kinds not in by_kinds:
                idle = PipelineSchedule(((),) * len(self.places.runs))
                by_kinds[kinds] = self._order(batches, replica) if batches else idle
            orders.append(by_kinds[kinds])
        return orders

    def _order(self, batches: Sequence[MicroBatch], number: int) -> PipelineSchedule:
        options, ranks = self.options, len(self.places.runs)
        if options.orders is not None:
            return read_csv(Path(options.orders), len(self.parts), len(batches))
        if options.schedule == "dapple":
            return dapple(ranks, len(batches), options.policy, self._most_held(batches))
        if options.schedule not in ("planned", "kfkb"):
            return orders_of(options.schedule, ranks, len(batches), v=options.v)
        replica = self._replica(batches, number)
        if options.schedule == "kfkb":
            return kfkb(ranks, len(batches), group_size(replica, options.k))
        every = zip(self._alike, self.replicas, strict=True)
        kinds = {(alike, *(batch.kind for batch in own)) for alike, own in every if own}
        return planned_order(replica, len(kinds), options.decoded)

    def _replica(self, batches: Sequence[MicroBatch], number: int = 0) -> Replica:
        return Replica(
            self._times(batches, number), self._kept_table(batches), self._limits(batches), self.places.placement
        )

    def _kept_table(self, batches: Sequence[MicroBatch]) -> Table:
        return [[self._kept(batch, stage) for batch in batches] for stage in range(len(self.parts))]

    def _limits(self, batches: Sequence[MicroBatch]) -> list[float]:
        """GiB for what micro-batches have saved, on the ranks of every run."""
        limit = limit_of(self.cost) - self.waiting
        return [limit - self._state(stages) - self._running(batches, stages) for stages in self.stages_on]

    def _most_held(self, batches: Sequence[MicroBatch]) -> list[int]:
        """How many of the largest micro-batches fit on a rank of each run, one at least: less is not a pipeline."""
        kept, limits = self._kept_table(batches), self._limits(batches)
        pairs = zip((max(max(kept[stage]) for stage in stages) for stages in self.stages_on), limits, strict=True)
        return [max(1, floor(limit / size)) if size else len(batches) for size, limit in pairs]

    def _firsts(self, stage: int) -> tuple[int, ...]:
        """The first rank of a stage in each replica."""
        return self.places.of(stage)[:: self.widths[self.places.placement[stage]]]

    def _times(self, batches: Sequence[MicroBatch], replica: int) -> StageTimes:
        """ms of every stage, phase and micro-batch of a replica, and of messages where the link is slowest."""

        def table(phase: Phase) -> list[list[float]]:
            rows = ((batch.cascades.get((stage, phase)) for batch in batches) for stage in range(len(self.parts)))
            return [[0.0 if cascade is None else self._time(cascade, replica) for cascade in row] for row in rows]

        def sent(phase: Phase, step: int) -> list[list[float]]:
            rows = []
            for cut in range(len(self.parts) - 1):
                source, target = (cut, cut + 1) if step > 0 else (cut + 1, cut)
                pairs = [(x.cascades.get((source, phase)), x.cascades.get((target, phase))) for x in batches]
                sizes = [self.cost.handed(x, y) * GIB if x is not None and y is not None else 0.0 for x, y in pairs]
                links = zip(self._firsts(source), self._firsts(target), strict=True)
                a, b = max(links, key=lambda link: handoff_time(self.cost.cluster, link[0], link[1], GIB))
                rows.append([handoff_time(self.cost.cluster, a, b, size) if size else 0.0 for size in sizes])
            return rows

        return StageTimes(
            table(Phase.FORWARD),
            table(Phase.BACKWARD),
            table(Phase.WEIGHT),
            send_forward=sent(Phase.FORWARD, 1),
            send_backward=sent(Phase.BACKWARD, -1),
        )

    @cached_property
    def stages_on(self) -> list[list[int]]:
        """The stages of every run."""
        placement = self.places.placement
        return [[stage for stage, run in enumerate(placement) if run == own] for own in range(len(self.places.runs))]

    @cached_property
    def needed(self) -> list[float]:
        """GiB on the ranks of each run: state, what the most micro-batches at once have saved, and workspace."""
        most = [0.0] * len(self.places.runs)
        for lane in self.lanes:
            alone = PipelineSchedule((lane.order,))
            running = self._running(lane.batches, self.stages_on[lane.run])
            most[lane.run] = max(most[lane.run], held(alone, self._kept_table(lane.batches))[0] + running)
        return [self._state(stages) + saved for stages, saved in zip(self.stages_on, most, strict=True)]

    def _state(self, stages: Sequence[int]) -> float:
        """GiB that always lie on the ranks of these stages."""
        everywhere = sum(gib(stage.attrs.get("state")) for stage in self.module.stages if stage not in self.parts)
        return everywhere + sum(gib(self.parts[stage].attrs.get("state")) for stage in stages)

    def _kept(self, batch: MicroBatch, stage: int) -> float:
        """GiB from the forward of a micro-batch to its last gradient."""
        key = batch.kind, stage
        if key not in self._kept_by_kind:
            forward = batch.cascades[stage, Phase.FORWARD]
            width, side = self._width(forward.stage), self._side(forward)
            self._kept_by_kind[key] = self.cost.kept(forward, width, self._blocks(forward), side)
        return self._kept_by_kind[key]

    @cached_property
    def _kept_by_kind(self) -> dict[tuple[int, int], float]:
        return {}

    def _running(self, batches: Sequence[MicroBatch], stages: Sequence[int]) -> float:
        """GiB that a forward or backward needs while it runs, beyond what is kept."""
        most = 0.0
        for batch in {batch.kind: batch for batch in batches}.values():
            for stage in stages:
                begun = batch.cascades[stage, Phase.FORWARD]
                side, width = self._side(begun), self._width(begun.stage)
                forward = self.cost.memory(begun, width, self._blocks(begun), side)
                backward = batch.cascades.get((stage, Phase.BACKWARD))
                most = max(most, forward - self._kept(batch, stage))
                if backward is not None:
                    most = max(most, self.cost.memory(backward, width, self._blocks(backward), side))
        return most

    @property
    def fits(self) -> bool:
        if self.options.schedule == "planned" and self.options.orders is None:
            # a search keeps to the limits, whatever it finds
            different = {tuple(batch.kind for batch in own): own for own in self.replicas if own}
            return not any(exceeds_alone(self._replica(own)) for own in different.values())
        return max(self.needed) <= limit_of(self.cost) - self.waiting

    def placed(self) -> list[Cascade]:
        """Every cascade on its ranks, as early as its inputs, their handoffs and its rank's order allow."""
        lanes = [(lane.ranks, list(self._cascades_of(lane))) for lane in self.lanes]
        free = [0.0] * self.cost.cluster.world
        done: dict[str, Cascade] = {}
        at = [0] * len(lanes)
        moved = True
        while moved:
            moved = False
            for number, (ranks, cascades) in enumerate(lanes):
                while at[number] < len(cascades):
                    cascade = cascades[at[number]]
                    if any(name not in done for name in cascade.inputs):
                        break
                    inputs = [done[name] for name in cascade.inputs]
                    done[cascade.name] = placed = self._on(cascade, ranks, inputs, free)
                    for rank in placed.ranks:
                        free[rank] = placed.end
                    at[number] += 1
                    moved = True
        waiting = [cascades[at[n]].name for n, (_, cascades) in enumerate(lanes) if at[n] < len(cascades)]
        assert not waiting, f"the pipeline waits for itself at {waiting}"
        return [done[cascade.name] for cascade in self.module.cascades]

    def _on(
        self, cascade: Cascade, ranks: tuple[int, ...], inputs: Sequence[Cascade], free: Sequence[float]
    ) -> Cascade:
        side = 1 if cascade.phase is Phase.ENCODE else self._side(cascade)
        if cascade.phase is Phase.ENCODE:
            ranks = ranks[: min(len(ranks), max(self.cost.legal_degrees(cascade)))]
        degree, again = len(ranks), self.cost.can_recompute(cascade) or cascade.phase is Phase.BACKWARD
        recompute = self._blocks(cascade) if again else 0
        time = self.cost.time(cascade, degree, ranks=ranks, recompute=recompute, side=side)
        begun = decided(cascade, self.cost, degree, recompute, 0.0, time, side)
        return on(begun, ranks, inputs, free, self.cost)

    def _cascades_of(self, lane: Lane) -> Iterator[Cascade]:
        """The cascades of a lane in its order, and among them its share of the encoders."""
        encoded = 0
        for action in lane.order:
            while encoded < len(lane.encodes) and lane.encodes[encoded] <= action.micro_batch + lane.ahead:
                yield from lane.batches[lane.encodes[encoded]].encoders
                encoded += 1
            yield from self._cascades(lane.batches[action.micro_batch], action)
        for number in lane.encodes[encoded:]:
            yield from lane.batches[number].encoders

    def _cascades(self, batch: MicroBatch, action: Action) -> Iterator[Cascade]:
        phases = {FORWARD: (Phase.FORWARD,), ACTIVATION_GRADIENT: (Phase.BACKWARD,), WEIGHT_GRADIENT: (Phase.WEIGHT,)}
        for phase in phases.get(action.kind, (Phase.BACKWARD, Phase.WEIGHT)):
            cascade = batch.cascades.get((action.stage, phase))
            if cascade is not None:
                yield cascade


def limit_of(cost: CostModel) -> float:
    """GiB for stages and cascades on a rank."""
    return cost.room + cost.resident
