"""The communicators that a rank's program uses, and the memory they take beside the allocator's.

A group of ranks has one communicator for the collectives of cascades, whatever the order of its ranks. Gradient
all-reduces have their own, because they run beside those, and so has a cell that gathers its parameters. Updated
parameters are gathered on that of the all-reduces, which is idle then. A device-to-device handoff has one per
direction.
"""

from __future__ import annotations

from collections.abc import Container
from functools import lru_cache
from typing import TypeAlias

from arachnec.analysis.execution_model import ExecutionModel
from arachnec.analysis.group_family import ALWAYS, family, heads_of
from arachnec.analysis.residency import learning_ranks
from arachnec.analysis.uses import Values
from arachnec.ir.nodes import Cluster, Instruction, Program, Stage, integer, integers
from arachnec.ir.parameter_cells import side_by_side
from arachnec.ir.values import Value
from arachnec.kernels.attention.subgroups import subgroups

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
