"""Planners of pipeline stages on a module: AdaPtis' search and DAPPLE's, on the costs of every layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import fsum

from arachnec.cluster.topology import handoff_time
from arachnec.cost.memory import GIB, saved_for_backward
from arachnec.cost.model import CostModel
from arachnec.executable.folder import batch_sizes, iteration_of
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.nodes import Cascade, Cluster, Module, Phase, Stage
from arachnec.ir.stage_sizes import gib, gradient_bytes, layers_of, uneven
from arachnec.pipelining.errors import fits_nowhere
from arachnec.pipelining.hybrid_plan import HybridPlan, Instance, Machines
from arachnec.pipelining.hybrid_search import best_plan
from arachnec.pipelining.pipeline_model import LayerCosts, PipelineInstance
from arachnec.pipelining.pipeline_search import FoundPlan, find_plan
from arachnec.pipelining.profile_file import Layer, LayerProfile
from arachnec.planning.pipeline_places import MicroBatch, micro_batches
from arachnec.planning.stage_cuts import parts_of

SAMPLE = 4  # iterations of the manifest that plans of stages are made for

Shape = tuple[int, int, int]  # clips, tokens, text


@dataclass(frozen=True)
class CostedLayers:
    """``module`` is costed, its trained stage cut into single layers; ``shapes`` are its micro-batches, each of them
    once with how many there are, in all ``iterations`` of the sample."""

    cost: CostModel
    parts: tuple[Stage, ...]
    shapes: tuple[tuple[MicroBatch, int], ...]
    iterations: int

    @property
    def micro_batches(self) -> int:
        """Of one iteration, on average."""
        return max(1, round(sum(count for _, count in self.shapes) / self.iterations))

    def costs(self, degree: int, recompute: bool, stages: int) -> tuple[LayerCosts, ...]:
        """Of one micro-batch on ``degree`` ranks: ms, and GiB on each of them.

        What a stage receives and hands on is spread over the layers that it has, with so many ``stages``.
        """
        phases = Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT

        def time(cascade: Cascade) -> float:
            return self.cost.time(cascade, degree, recompute=int(recompute))

        def of(layer: int, part: Stage) -> LayerCosts:
            forward, activation, weight = (self._mean(layer, phase, time) for phase in phases)
            saved = self._mean(layer, Phase.FORWARD, lambda c: self._saved(c, degree, recompute, stages))
            output = self._mean(layer, Phase.FORWARD, self.cost.output)
            return LayerCosts(forward, activation, weight, saved, gib(part.attrs.get("state")), output)

        return tuple(of(layer, part) for layer, part in enumerate(self.parts))

    def running(self, degree: int, recompute: bool) -> float:
        """GiB that the largest cascade needs while it runs, beyond what is kept."""
        forwards = [b.cascades[layer, Phase.FORWARD] for b, _ in self.shapes for layer in range(len(self.parts))]
        blocks = int(recompute)
        return max(self.cost.memory(c, degree, blocks) - self.cost.kept(c, degree, blocks) for c in forwards)

    def limit(self, ranks: Sequence[int]) -> float:
        """GiB for layers and micro-batches on each of these ranks: encoders lie on all of them."""
        name = self.parts[0].name
        own = gib(self.parts[0].attrs.get("state"))
        return self.cost.room_on(ranks, len(ranks), name) + own

    def handoff(self, source: int, target: int, size: float) -> float:
        """ms of so many GiB."""
        return handoff_time(self.cost.cluster, source, target, size * GIB)

    def all_reduce(self, first: int, last: int, ranks: tuple[int, ...]) -> float:
        """ms to all-reduce the gradients of these layers over these ranks."""
        return fsum(self.cost.reduce_time(part, ranks) for part in self.parts[first:last] if part.trained)

    @cached_property
    def _total(self) -> int:
        return sum(count for _, count in self.shapes)

    def _mean(self, layer: int, phase: Phase, value: Callable[[Cascade], float]) -> float:
        of = ((batch.cascades.get((layer, phase)), count) for batch, count in self.shapes)
        return fsum(value(cascade) * count for cascade, count in of if cascade is not None) / self._total

    def _saved(self, forward: Cascade, degree: int, recompute: bool, stages: int) -> float:
        stage = self.cost.stages[forward.stage]
        own = saved_for_backward(stage, forward, uneven(forward.tokens, degree), int(recompute))
        ends = self.cost.received(forward) + self.cost.output(forward)
        return own + ends * stages / len(self.parts)


def costed_layers(module: Module, stage: Stage, costed: Callable[[Module], Module]) -> CostedLayers:
    """``costed`` makes micro-batches of an iteration's clips and costs them: the passes before the scheduler.

    Each layer is made a stage of its own and costed as any other, embedding with the first and head with the last. The
    costs are the mean over the micro-batches of the first iterations of the manifest (``SAMPLE``).
    """
    parts = parts_of(stage, range(1, len(layers_of(stage))))
    stages = tuple(part for other in module.stages for part in (parts if other.name == stage.name else (other,)))
    count = min(SAMPLE, max(1, len(batch_sizes(module))))
    shapes: Counter[Shape] = Counter()
    of: dict[Shape, tuple[Module, MicroBatch]] = {}
    for number in range(count):
        iteration = costed(iteration_of(replace(module, stages=stages), number))
        own = [node for node in iteration.stages if node.attrs.get("part_of") == stage.name]
        for batch in micro_batches(iteration, own):
            first = batch.cascades[0, Phase.FORWARD]
            shape = (first.batch, first.tokens, first.text)
            shapes[shape] += 1
            of.setdefault(shape, (iteration, batch))
    return _joined(of, shapes, stage.name, count)


def _joined(
    of: Mapping[Shape, tuple[Module, MicroBatch]], shapes: Mapping[Shape, int], name: str, iterations: int
) -> CostedLayers:
    """One module with a micro-batch of every shape, under names of their own."""
    first = next(iter(of.values()))[0]
    renamed: list[Cascade] = []
    for number, (iteration, batch) in enumerate(of.values()):
        wanted = {c.name for c in (*batch.encoders, *batch.cascades.values())}
        for cascade in iteration.cascades:
            if cascade.name in wanted:
                inputs = tuple(f"{number}_{source}" for source in cascade.inputs)
                # clips of other iterations may have the same numbers: a shape's number stands for its clips
                renamed.append(replace(cascade, name=f"{number}_{cascade.name}", inputs=inputs, clips=(number,)))
    module = replace(first, cascades=tuple(renamed))
    parts = tuple(node for node in module.stages if node.attrs.get("part_of") == name)
    batches = micro_batches(module, parts)
    return CostedLayers(CostModel(module), parts, tuple(zip(batches, shapes.values(), strict=True)), iterations)


TRIES = 60  # repairs of each of the best seeds
ROUNDS = 3  # micro-batches a rank that the search looks at; those beyond add what the busiest rank takes for them

Runs = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Joint:
    """A plan of ``runs`` of ranks, and the step that it promises: all micro-batches and the gradients' all-reduce."""

    runs: Runs
    degree: int
    instance: PipelineInstance
    search: FoundPlan
    step: float


def adaptis_stages(layers: CostedLayers, stage: Stage) -> tuple[Stage, ...]:
    """The stages of the best plan, each with its ``place``. Raises UserError where nothing fits.

    Ranks are cut into runs; a pipeline has one rank of each, or one group that shares a clip. For every number of runs
    the search's seeds are evaluated; from the best number on it repairs bottlenecks. Runs have the speed and the memory
    of their nodes' kind.
    """
    plan = joint_plan(layers)
    sizes, placement = plan.search.plan.sizes, plan.search.plan.placement
    parts = parts_of(stage, list(accumulate(sizes))[:-1])
    places = (plan.runs[run] for run in placement)
    return tuple(
        replace(part, attrs=part.attrs.updated(place=place)) for part, place in zip(parts, places, strict=True)
    )


def joint_plan(layers: CostedLayers) -> Joint:
    world, count = layers.cost.cluster.world, len(layers.parts)
    ranks = [p for p in range(1, min(world, count) + 1) if world % p == 0]
    seeds = [plan for p in ranks for plan in _least_degree(layers, p)]
    if not seeds:
        raise fits_nowhere(count, world)
    best = min(seeds, key=lambda plan: plan.step)
    return min(best, _searched(layers, best.runs, best.degree, best.instance, TRIES), key=lambda plan: plan.step)


def _least_degree(layers: CostedLayers, ranks: int) -> list[Joint]:
    """Seeds alone, at the least degree that fits, without recomputation and with it."""
    size = layers.cost.cluster.world // ranks
    runs = tuple(tuple(range(first, first + size)) for first in range(0, ranks * size, size))
    for degree in (d for d in range(1, size + 1) if size % d == 0):
        fitting = []
        for recompute in (False, True):
            instance = _instance(layers, runs, degree, recompute)
            if sum(layer.state + layer.saved for layer in instance.layers) > sum(instance.memory):
                continue  # one micro-batch is too much for all ranks
            try:
                fitting.append(_searched(layers, runs, degree, instance, 0))
            except UserError:
                continue
        if fitting:
            return fitting
    return []


def _searched(layers: CostedLayers, runs: Runs, degree: int, instance: PipelineInstance, tries: int) -> Joint:
    searched = find_plan(instance, tries=tries)
    costs, plan = searched.performance, searched.plan
    looked_at = instance.micro_batches
    every = -(-layers.micro_batches * degree // len(runs[0]))
    beyond = max(0, every - looked_at) * max(costs.compute) / looked_at
    ends = [0, *accumulate(plan.sizes)]
    reduces = [0.0] * len(runs)
    for stage, run in enumerate(plan.placement):
        reduces[run] += layers.all_reduce(ends[stage], ends[stage + 1], runs[run])
    return Joint(runs, degree, instance, searched, costs.makespan + beyond + max(reduces))


def _instance(layers: CostedLayers, runs: Runs, degree: int, recompute: bool) -> PipelineInstance:
    stages = len(runs)
    costs = layers.costs(degree, recompute, stages)
    replicas = len(runs[0]) // degree
    count = min(-(-layers.micro_batches // replicas), ROUNDS * stages)
    running = layers.running(degree, recompute)
    size = max((c.output for c in costs), default=0.0)
    neighbours = [layers.handoff(a[0], b[0], size) for a in runs for b in runs if a != b]
    slowest = max(neighbours, default=0.0)
    return PipelineInstance(
        costs,
        count,
        tuple(1 / layers.cost.devices.slowdown(run) for run in runs),
        tuple(layers.limit(run) - running for run in runs),
        bandwidth=size / slowest if slowest else float("inf"),
    )


Groups = tuple[tuple[tuple[int, ...], ...], ...]  # of every machine, its devices, each a group of ranks


def dapple_stages(layers: CostedLayers, stage: Stage, profile: LayerProfile | None, batch: int) -> tuple[Stage, ...]:
    """The stages of the plan with the least latency, each with its ``place``.

    The degree is the least at which a plan fits. ``profile``, of so many clips a ``batch``, replaces the module's own
    times and sizes. Raises UserError where nothing fits or the profile is for another model.

    A device of the planner is a group of ranks that share a clip, one rank where the micro-batches fit one. Machines
    are the cluster's nodes. Times are the module's own, or those of a profile file in DAPPLE's format.
    """
    given = None if profile is None else by_blocks(profile, stage)
    for degree, groups in device_groups(layers.cost.cluster):
        plans = [plan for again in (False, True) if (plan := _plan(layers, degree, groups, again, given, batch))]
        if plans:
            return _placed(stage, min(plans, key=lambda plan: plan.latency), groups)
    raise fits_nowhere(len(layers.parts), layers.cost.cluster.world)


def device_groups(cluster: Cluster) -> Iterator[tuple[int, Groups]]:
    """Degrees that divide a machine, or are machines that divide the cluster; and the groups of each."""
    for degree in range(1, cluster.world + 1):
        size = max(degree, cluster.gpus)
        if size % degree == 0 and cluster.world % size == 0 and size % cluster.gpus == 0:
            yield (
                degree,
                tuple(
                    tuple(tuple(range(first, first + degree)) for first in range(machine, machine + size, degree))
                    for machine in range(0, cluster.world, size)
                ),
            )


def _plan(
    layers: CostedLayers, degree: int, groups: Groups, recompute: bool, given: LayerProfile | None, batch: int
) -> HybridPlan | None:
    devices = sum(map(len, groups))
    costs = layers.costs(degree, recompute, min(devices, len(layers.parts)))
    profile = given or LayerProfile(
        tuple(
            Layer(part.name, c.forward, c.activation_gradient + c.weight_gradient, c.output * GIB, gradient_bytes(part))
            for part, c in zip(layers.parts, costs, strict=True)
        ),
        tuple(c.output * GIB for c in costs[:-1]),
    )
    room = min(layers.limit(group) for machine in groups for group in machine) - layers.running(degree, recompute)
    count = layers.micro_batches
    instance = Instance(
        profile,
        _machines(layers, groups),
        batch=count,
        micro_batch=1,
        profile_batch=1 if given is None else batch,
        needs=tuple(c.state + c.saved for c in costs),
        room=room,
    )
    pipelines = [copies for copies in range(1, devices + 1) if devices % copies == 0 and count % copies == 0]
    try:
        return best_plan(instance, pipelines)
    except UserError:
        return None


def _machines(layers: CostedLayers, groups: Groups) -> Machines:
    """Speeds of handoffs and of all-reduces, as the cost model has them."""
    cluster, one = layers.cost.cluster, 1.0  # GiB
    first = groups[0][0][0]

    def speed(target: int) -> float:
        return one * GIB / layers.handoff(first, target, one) * 1e3

    inside = speed(groups[0][1][0]) if len(groups[0]) > 1 else float("inf")
    if len(groups) == 1:
        return Machines(1, len(groups[0]), inside=inside)
    everyone = tuple(range(cluster.world))
    size = sum(gradient_bytes(part) for part in layers.parts)
    reduce = 2 * size / max(1e-9, layers.all_reduce(0, len(layers.parts), everyone)) * 1e3
    return Machines(len(groups), len(groups[0]), speed(groups[1][0][0]), reduce, inside)


def _placed(stage: Stage, plan: HybridPlan, groups: Groups) -> tuple[Stage, ...]:
    """The plan's devices are taken machine by machine; copies of the whole pipeline take their turns together."""
    copies = plan.pipelines
    machines = len(groups) // copies if plan.apart else len(groups)
    own = len(groups[0]) if plan.apart else len(groups[0]) // copies
    used = [0] * machines
    parts = parts_of(stage, [part.first for part in plan.stages[1:]])
    placed = []
    for part, devices in zip(parts, (part.devices for part in plan.stages), strict=True):
        place: list[int] = []
        for machine, count in enumerate(devices):
            for device in range(used[machine], used[machine] + count):
                for copy in range(copies):
                    at, slot = (copy * machines + machine, device) if plan.apart else (machine, copy * own + device)
                    place += groups[at][slot]
            used[machine] += count
        placed.append(replace(part, attrs=part.attrs.updated(place=tuple(place))))
    return tuple(placed)


def by_blocks(profile: LayerProfile, stage: Stage) -> LayerProfile:
    """The profile with one layer a block: what stands before a block's line goes with it, and what is last with the
    last. Raises UserError for the profile of another model."""
    names = [path for path, _ in layers_of(stage)]
    at = {layer.name: number for number, layer in enumerate(profile.layers)}
    lacking = next((name for name in names if name not in at), None)
    if lacking is not None:
        raise user_error(
            f"the profile has no layer named `{lacking}`, and @{stage.name} has such a block",
            help="name a block's line by its path in the model; lines before the first block are the embedding",
        )
    for before, after in pairwise(names):
        if at[after] < at[before]:
            raise user_error(
                f"the profile has `{after}` before `{before}`, and @{stage.name} runs it behind",
                help="give the blocks' edges in the order in which the model runs them",
            )
    bounds = [0, *(at[name] + 1 for name in names[:-1]), len(profile.layers)]
    joined = []
    for name, (a, b) in zip(names, pairwise(bounds), strict=True):
        run = profile.layers[a:b]
        forward, backward = sum(layer.forward for layer in run), sum(layer.backward for layer in run)
        joined.append(Layer(name, forward, backward, run[-1].activation, sum(layer.parameters for layer in run)))
    return LayerProfile(tuple(joined), tuple(profile.cuts[b - 1] for b in bounds[1:-1]))
