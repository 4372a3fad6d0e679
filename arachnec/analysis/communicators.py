"""What a back end does with a program: handoffs, process groups of a fixed family, communicators and their memory.

A handoff over the *host* network (gloo, CPU tensors in pinned memory) occupies no stream of a device. A handoff from
*device* to device (NCCL) is a kernel on both ranks: it spins from where it is posted until the other side is there.

A group of the family is consecutive ranks from a multiple of its size on. Its subgroups of Ulysses and ring are few as
well: those of Ulysses are smaller groups of the family, those of the ring have one stride.

A group of ranks has one communicator for the collectives of cascades, whatever the order of its ranks. Gradient
all-reduces have their own, because they run beside those, and so has a cell that gathers its parameters. Updated
parameters are gathered on that of the all-reduces, which is idle then. A device-to-device handoff has one per
direction.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Container, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias

from arachnec.analysis.stage_ranks import learning_ranks
from arachnec.analysis.uses import Values
from arachnec.ir.nodes import Cascade, Cluster, Instruction, Program, Stage, integer, integers
from arachnec.ir.parameter_cells import side_by_side
from arachnec.ir.values import Value
from arachnec.kernels.attention.subgroups import subgroups

MOST_COMMUNICATORS = 16  # of a rank
ALWAYS = 2  # of them: that of all ranks, and that of the gradient all-reduces

Grid = tuple[int, int]  # Ulysses and ring degree
Ranks = tuple[int, ...]


@lru_cache(maxsize=64)
def family_grids(cluster: Cluster, heads: tuple[int, ...] = ()) -> tuple[Grid, ...]:
    """Grids whose cascades need no more than ``MOST_COMMUNICATORS`` on any rank, all together; the first matter most.

    Parts of a node come first, then nodes by doubling and those whose Ulysses is as wide as there are heads; each with
    the widest Ulysses that splits the heads evenly, up to two nodes with uneven heads, too; then what is left.
    """
    used: list[set[range]] = [set() for _ in range(cluster.world)]
    grids: dict[Grid, None] = {}
    for grid in _candidates(cluster, heads or (cluster.world,)):
        if all(len(used[rank] | groups) <= MOST_COMMUNICATORS - ALWAYS for rank, groups in _members(cluster, grid)):
            grids[grid] = None
            for rank, groups in _members(cluster, grid):
                used[rank] |= groups
    return tuple(grids)


@lru_cache(maxsize=64)
def family(cluster: Cluster, heads: tuple[int, ...] = ()) -> tuple[Ranks, ...]:
    """Every group of more than one rank that cascades on the family's grids communicate in, subgroups included."""
    groups = (
        tuple(sorted(group))
        for ulysses, ring in family_grids(cluster, heads)
        for ranks in aligned(cluster, ulysses * ring)
        for group in subgroups(ranks, ulysses, ring)
    )
    return tuple(dict.fromkeys(groups))


def aligned(cluster: Cluster, size: int) -> tuple[Ranks, ...]:
    """Consecutive ranks from each multiple of ``size`` on; of less than a node those that lie in one."""
    return tuple(tuple(range(first, first + size)) for first in _firsts(cluster, size))


def _firsts(cluster: Cluster, size: int) -> list[int]:
    firsts = range(0, cluster.world - size + 1, size)
    return [
        first for first in firsts if size >= cluster.gpus or first // cluster.gpus == (first + size - 1) // cluster.gpus
    ]


def heads_of(stages: tuple[Stage, ...]) -> tuple[int, ...]:
    """The numbers of heads of trained stages that have attentions."""
    heads = (stage.attrs.get("heads") for stage in stages if stage.trained)
    return tuple(sorted({count for count in heads if isinstance(count, int) and count > 1}))


def in_family(cascade: Cascade, grids: Collection[Grid]) -> bool:
    """Whether a placed cascade communicates in groups of the family with these grids alone."""
    if cascade.degree == 1:
        return True
    ranks = cascade.ranks
    first = ranks[0]
    if first % len(ranks) or ranks != tuple(range(first, first + len(ranks))):
        return False
    if "ulysses" not in cascade.attrs:
        return any(ulysses * ring == len(ranks) for ulysses, ring in grids)
    return (cascade.attrs["ulysses"], cascade.attrs.get("ring", 1)) in grids


def _candidates(cluster: Cluster, heads: tuple[int, ...]) -> Iterator[Grid]:
    def widest(size: int) -> int:
        return max(math.gcd(size, count) for count in heads)

    most = max(heads)
    others = [*range(2 * cluster.gpus, cluster.world, cluster.gpus), *range(3, cluster.gpus)]
    split_as_heads = {size for size in others if size > cluster.gpus and widest(size) == min(size, most)}
    for size in sorted({*_sizes(cluster), *split_as_heads}):
        yield widest(size), size // widest(size)
        if size <= 2 * cluster.gpus:
            ulysses = max(u for u in _divisors(size) if u <= min(most, cluster.gpus))
            yield ulysses, size // ulysses
    yield from ((widest(size), size // widest(size)) for size in others)


def _sizes(cluster: Cluster) -> Iterator[int]:
    """Parts of a node, then nodes by doubling, then all."""
    yield from (size for size in _divisors(cluster.gpus) if size > 1)
    size = 2 * cluster.gpus
    while size <= cluster.world:
        yield size
        size *= 2
    if cluster.world > 1:
        yield cluster.world


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _members(cluster: Cluster, grid: Grid) -> Iterator[tuple[int, set[range]]]:
    """Each rank that runs a cascade on this grid, and its groups there: ``subgroups`` of which it is one."""
    ulysses, ring = grid
    size = ulysses * ring
    for first in _firsts(cluster, size):
        for place in range(size):
            row, column = first + place // ulysses * ulysses, first + place % ulysses
            groups = {
                range(first, first + size),
                range(row, row + ulysses),
                range(column, column + (ring - 1) * ulysses + 1, ulysses),
            }
            yield first + place, {group for group in groups if len(group) > 1}


HandoffPath: TypeAlias = Literal["host", "device"]
ReceivePosting: TypeAlias = Literal["in-place", "prefetched", "after-dependencies"]
Connections: TypeAlias = Literal["start", "first-use"]

STREAMS = 32  # in torch's pool; with more communicators than that two share one
HARDWARE_QUEUES = 8  # of a device, by default (CUDA_DEVICE_MAX_CONNECTIONS); one of them computes


@dataclass(frozen=True)
class ExecutionModel:
    """How one back end runs handoffs.

    ``receives`` are posted where they stand, as early as memory allows, or as early as memory and what their sends
    depend on allow. ``connections`` between two ranks that hand values over are made before the program starts, or at
    the first use, for which both hosts wait.
    """

    handoffs: HandoffPath = "host"
    receives: ReceivePosting = "prefetched"
    connections: Connections = "start"

    @property
    def posted_place_counts(self) -> bool:
        """Whether it matters to other ranks where a receive is posted: it holds up its device, or its host."""
        return self.handoffs == "device" or self.connections == "first-use"


HOST_HANDOFFS = ExecutionModel()
DEVICE_HANDOFFS = ExecutionModel("device", "after-dependencies")


Communicator: TypeAlias = tuple[str, frozenset[int]] | tuple[str, int, int]

COLLECTIVE = ("encode", "forward", "denoise", "decode")  # a backward uses its forward's
COMMUNICATOR_MIB = 64  # of device memory each: tens to a hundred by NCCL's buffers, never measured here


def communicators(program: Program, model: ExecutionModel) -> frozenset[Communicator]:
    """Every communicator that this rank is a member of."""
    names: set[Communicator] = set()
    cells = {integers(step.attrs["cell"]) for step in program.instructions if "cell" in step.attrs}
    for step in program.instructions:
        if len(step.peers) < 2:
            if model.handoffs == "device" and step.op in ("send", "receive"):
                names.add(handoff_channel(step, program.rank))
        elif step.op in ("gather", "reduce", "learn"):
            names.add(_all_reduce(step.peers))
        elif step.op == "norm":
            names.add(norm_communicator(step.peers, cells))
        elif step.op in COLLECTIVE:
            names.update(("cascade", group) for group in _sets(cascade_groups(step)) if program.rank in group)
            if len(integers(step.attrs.get("cell", ()))) > 1:
                names.add(("cell", frozenset(integers(step.attrs["cell"]))))
    return frozenset(names)


def norm_communicator(ranks: tuple[int, ...], cells: Container[tuple[int, ...]]) -> Communicator:
    """That over which the norm of gradients is summed: a cell's own, else that of an all-reduce over these ranks."""
    return ("cell" if ranks in cells else "all-reduce"), frozenset(ranks)


def handoff_channel(step: Instruction, rank: int) -> Communicator:
    """That of a send or receive from device to device: from whom, to whom."""
    return ("handoff", rank, step.peers[0]) if step.op == "send" else ("handoff", step.peers[0], rank)


def resident(values: Values, program: Program, model: ExecutionModel) -> frozenset[Communicator]:
    """Those of ``communicators`` and those that this rank has whatever its program: what is made at the start.

    These are the group of all ranks, the family of groups, and where something is trained a gradient all-reduce: a
    planner asks before that is in the program. None on CPUs, whose groups take no device memory.
    """
    module = values.module
    if module.cluster is None or module.cluster.world == 1 or module.cluster.attrs.get("device") == "cpu":
        return frozenset()
    used = communicators(program, model)
    kept = family_of_ranks(module.cluster, heads_of(module.stages))[program.rank]
    synchronised = not values.trained or any(name[0] == "all-reduce" for name in used)
    everyone = _all_reduce(tuple(range(module.cluster.world)))
    learning = (ranks for ranks in learning_ranks(module, module.cluster) if len(ranks) > 1 and program.rank in ranks)
    used |= set(map(_all_reduce, learning))
    return used | kept | {("world", everyone[1])} | (set() if synchronised else {everyone})


def communicator_gib(values: Values, program: Program, model: ExecutionModel) -> float:
    """GiB of device memory that this rank's communicators take, those of the family included; 0 on CPUs."""
    return len(resident(values, program, model)) * COMMUNICATOR_MIB / 1024


def most_resident_gib(cluster: Cluster, stages: tuple[Stage, ...]) -> float:
    """GiB that communicators made at the start take on the rank that has most; 0 on CPUs."""
    if cluster.world == 1 or cluster.attrs.get("device") == "cpu":
        return 0.0
    most = max(map(len, family_of_ranks(cluster, heads_of(stages))))
    return (ALWAYS + most) * COMMUNICATOR_MIB / 1024


@lru_cache(maxsize=64)
def family_of_ranks(cluster: Cluster, heads: tuple[int, ...]) -> tuple[frozenset[Communicator], ...]:
    """The communicators of every rank for the groups of the family."""
    members: list[set[Communicator]] = [set() for _ in range(cluster.world)]
    for group in map(frozenset, family(cluster, heads)):
        for rank in group:
            members[rank].add(("cascade", group))
    return tuple(map(frozenset, members))


def cascade_groups(step: Instruction) -> tuple[tuple[int, ...], ...]:
    """Every group of several ranks in which the collectives of an encode, forward, denoise or decode run; else none."""
    if len(step.peers) < 2:
        return ()
    if step.op in ("encode", "decode"):
        return (step.peers,)
    if step.op not in ("forward", "denoise"):
        return ()
    return tuple(group for ranks, product in sides_of(step) for group in subgroups(ranks, *product))


def sides_of(step: Instruction) -> tuple[tuple[tuple[int, ...], tuple[int, int]], ...]:
    """The ranks of each clip, or branch, side by side of a forward or denoise, and their Ulysses and ring degree."""
    return _sides(step.peers, *(step.attrs.get(name) for name in ("ulysses", "ring", "side", "unconditional")))


def grid(step: Instruction) -> tuple[int, int]:
    """Ulysses and ring degree of a forward or denoise, or of its conditional branch; all ranks exchange heads where it
    does not say."""
    return sides_of(step)[0][1]


@lru_cache(maxsize=8192, typed=True)
def _sides(
    peers: tuple[int, ...], ulysses: Value | None, ring: Value | None, side: Value | None, unconditional: Value | None
) -> tuple[tuple[tuple[int, ...], tuple[int, int]], ...]:
    """Worked out once for the ranks of a cascade, which all say the same."""
    other, clips = integers(unconditional or ()), 1 if side is None else integer(side)
    second = other[0] * other[1] if other else 0
    degree = len(peers) - second if other else len(peers) // clips
    heads = integer(ulysses) if ulysses is not None else 1 if ring is not None else degree
    own = heads, integer(ring) if ring is not None else degree // heads
    if other:
        return (peers[:-second], own), (peers[-second:], (other[0], other[1]))
    return tuple((ranks, own) for ranks in side_by_side(peers, clips))


@lru_cache(maxsize=256)
def _all_reduce(ranks: tuple[int, ...]) -> tuple[str, frozenset[int]]:
    return "all-reduce", frozenset(ranks)


@lru_cache(maxsize=8192)
def _sets(groups: tuple[tuple[int, ...], ...]) -> tuple[frozenset[int], ...]:
    """The same sets for every rank that asks."""
    return tuple(dict.fromkeys(map(frozenset, groups)))
