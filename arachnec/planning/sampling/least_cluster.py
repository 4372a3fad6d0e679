"""Requests that a cluster cannot hold. In: what fits, as a function of a module. Out: what is wrong, and the least
cluster that would do."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from arachnec.cluster.topology import machines
from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import UserError, counted, user_error
from arachnec.ir.nodes import Cascade, Cluster, Module
from arachnec.ir.stage_sizes import gib
from arachnec.ir.values import Quantity
from arachnec.planning.sampling.chains import Rates

Fits = Callable[[Module], bool]
"""Whether there is a plan of a module on its cluster."""

TIMES = 16  # as many ranks, and as much memory, is the most that is looked at
LARGE_NODE = 8  # devices, up to which a lone node may grow; beyond there are more nodes


def fits_no_rank(cascade: Cascade, cost: CostModel, fits: Fits) -> UserError:
    """What is wrong with a request that no number of these ranks holds."""
    rates = Rates(cost)
    needed = min(cost.memory(cascade, degree, 0, 1) for degree in cost.legal_degrees(cascade))
    state, room = cost.resident_with(cascade.stage), rates.room(cascade.stage)
    less = "ask for fewer frames or a lower resolution" if room > 0 else None
    remedy = _remedy(cost.module, fits, less)
    if room <= 0:
        remedy += f": its model alone has {state:.1f} GiB"
    return user_error(
        f"{_what(cascade, cost.module)} fits no rank: it needs {needed + state:.1f} GiB, its model included, there "
        f"are {room + state:.1f}",
        label="too large for this cluster",
        help=remedy,
        span=cascade.span,
    )


def not_this_way(policy: str, cost: CostModel, fits: Fits) -> UserError:
    """Each request fits some rank, but the policy finds no ranks that hold all the stages that lie together."""
    gpus = cost.cluster.world
    degrees = {"replica": (1,), "one-degree": (gpus,)}.get(policy)
    together = Rates(cost, {cascade.stage for cascade in cost.module.cascades})
    states = math.fsum(gib(cost.stages[name].attrs.get("state")) for name in together.stages)

    def missing(cascade: Cascade) -> float:
        """GiB by which the cascade does not fit on a rank that holds all stages."""
        able = cost.legal_degrees(cascade)
        least = min(cost.memory(cascade, degree, 0, 1) for degree in able if degrees is None or degree in degrees)
        return least - together.room(cascade.stage)

    able = [c for c in cost.module.cascades if degrees is None or set(degrees) & {*cost.legal_degrees(c)}]
    worst = max(able, key=missing, default=None)
    if worst is None or missing(worst) <= 0:
        reason = "it needs a rank for each model" if policy == "two-pools" else "some request needs another degree"
    else:
        room = together.room(worst.stage) + states
        reason = (
            f"{_what(worst, cost.module)} needs {room + missing(worst):.1f} GiB beside all of the stages, "
            f"there are {room:.1f}"
        )
        if gpus > 1 and policy in ("search", "two-pools"):
            reason += ", and shared out among the ranks the stages do not fit either"
    other = None if policy == "search" else f"take another policy than `{policy}`"
    return user_error(
        f"`{policy}` cannot run these requests on {counted(gpus, 'GPU')}: {reason}",
        help=f"{_remedy(cost.module, fits, other)}",
    )


def _what(cascade: Cascade, module: Module) -> str:
    names = {clip.id: str(clip.attrs.get("name", clip.id)) for clip in module.clips}
    requests = ", ".join(f"`{names[clip]}`" for clip in cascade.clips[:4])
    return f"request {requests} ({cascade.tokens} tokens, stage `@{cascade.stage}`)"


def _remedy(module: Module, fits: Fits, other: str | None) -> str:
    """The least cluster that would do, by ranks and by memory, and what else helps."""
    cluster = module.cluster
    assert cluster is not None, "a costed module has one"
    ways: list[str] = []
    ranks = least_ranks(module, fits)
    if ranks is not None:
        ways.append(f"use a cluster of at least {ranks} of these devices, such as `{short_form(cluster, ranks)}`")
    memory = least_memory(module, fits)
    if memory is not None:
        ways.append(f"{'' if ways else 'use '}devices of at least {memory} GiB")
    if other is not None or not ways:
        ways.append(other or "ask for fewer frames or a lower resolution, or use smaller models")
    return ", or ".join(ways)


def least_ranks(module: Module, fits: Fits) -> int | None:
    """The fewest ranks of this cluster's devices on which there is a plan; None where more of them do not help."""
    cluster = module.cluster
    assert cluster is not None
    if isinstance(cluster.attrs.get("mixed"), tuple):
        return None
    larger = range(cluster.world + 1, TIMES * cluster.world + 1)
    sizes = [world for world in larger if _in_one_node(cluster, world) or world % cluster.gpus == 0]
    return _least(sizes, lambda world: fits(replace(module, cluster=grown(cluster, world))))


def least_memory(module: Module, fits: Fits) -> int | None:
    """The least whole GiB of every device with which there is a plan on as many ranks; None where they do not help."""
    cluster = module.cluster
    assert cluster is not None
    own = max(machine.memory for machine in machines(cluster))
    sizes = range(math.floor(own) + 1, math.ceil(TIMES * own) + 1)
    return _least(sizes, lambda memory: fits(replace(module, cluster=_with_memory(cluster, memory))))


def _least(sizes: Sequence[int], fits: Callable[[int], bool]) -> int | None:
    """The least size that fits, as all larger ones do: doubled until one does, then halved."""
    below, step = -1, 1
    while below + step < len(sizes) and not fits(sizes[below + step]):
        below, step = below + step, 2 * step
    if below + step >= len(sizes):
        if not sizes or below == len(sizes) - 1 or not fits(sizes[-1]):
            return None
        step = len(sizes) - 1 - below
    return sizes[bisect_left(range(below + step), True, below + 1, key=lambda place: fits(sizes[place]))]


def _in_one_node(cluster: Cluster, world: int) -> bool:
    lone = cluster.nodes == 1 and (world <= LARGE_NODE or cluster.attrs.get("device") == "cpu")
    return lone or world <= cluster.gpus


def grown(cluster: Cluster, world: int) -> Cluster:
    """The cluster with so many ranks: a lone node with more devices up to a large one's, else more nodes."""
    if _in_one_node(cluster, world):
        return replace(cluster, attrs=cluster.attrs.updated(nodes=1, gpus=world, nics=None))
    return replace(cluster, attrs=cluster.attrs.updated(nodes=world // cluster.gpus))


def short_form(cluster: Cluster, world: int) -> str:
    """The grown cluster as it is named."""
    larger, device = grown(cluster, world), cluster.attrs.get("device", "cpu")
    return f"{world}:{device}" if larger.nodes == 1 else f"{larger.nodes}x{larger.gpus}:{device}"


def _with_memory(cluster: Cluster, memory: float) -> Cluster:
    """The cluster with so many GiB a device, where it has less."""
    mixed = cluster.attrs.get("mixed")
    rows = None
    if isinstance(mixed, tuple):
        rows = tuple((*row[:2], Quantity(float(memory), "GiB"), *row[3:]) for row in mixed if isinstance(row, tuple))
    return replace(cluster, attrs=cluster.attrs.updated(memory=Quantity(float(memory), "GiB"), mixed=rows))
