"""DAPPLE's planner on a module: its cuts, and the ranks of every stage. In: costed layers. Out: stages with a place.

A device of the planner is a group of ranks that share a clip, one rank where the micro-batches fit one. Machines are
the cluster's nodes. Times are the module's own, or those of a profile file in DAPPLE's format.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from arachnec.cost.memory import GIB
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.nodes import Cluster, Stage
from arachnec.ir.stage_sizes import gradient_bytes, layers_of
from arachnec.pipelining.errors import FitsNowhere
from arachnec.pipelining.hybrid_plan import HybridPlan, Instance, Machines
from arachnec.pipelining.hybrid_search import best_plan
from arachnec.pipelining.profile_file import Layer, LayerProfile
from arachnec.planning.layer_costs import CostedLayers
from arachnec.planning.stage_cuts import parts_of

Groups = tuple[tuple[tuple[int, ...], ...], ...]  # of every machine, its devices, each a group of ranks


def dapple_stages(layers: CostedLayers, stage: Stage, profile: LayerProfile | None, batch: int) -> tuple[Stage, ...]:
    """The stages of the plan with the least latency, each with its ``place``.

    The degree is the least at which a plan fits. ``profile``, of so many clips a ``batch``, replaces the module's own
    times and sizes. Raises UserError where nothing fits or the profile is for another model.
    """
    given = None if profile is None else by_blocks(profile, stage)
    for degree, groups in device_groups(layers.cost.cluster):
        plans = [plan for again in (False, True) if (plan := _plan(layers, degree, groups, again, given, batch))]
        if plans:
            return _placed(stage, min(plans, key=lambda plan: plan.latency), groups)
    raise UserError(FitsNowhere(None, len(layers.parts), layers.cost.cluster.world))


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
