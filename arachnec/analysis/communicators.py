"""The communicators that a rank's program uses, and the memory they take beside the allocator's.

A group of ranks has one communicator for the collectives of cascades, whatever the order of its ranks. Gradient
all-reduces have their own, because they run beside those. A device-to-device handoff has one per direction.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TypeAlias

from arachnec.analysis.execution_model import ExecutionModel
from arachnec.analysis.uses import Values
from arachnec.ir.nodes import Instruction, Program, integer
from arachnec.kernels.attention.subgroups import subgroups

Communicator: TypeAlias = tuple[str, frozenset[int]] | tuple[str, int, int]

COLLECTIVE = ("encode", "forward", "denoise")  # a backward uses its forward's
COMMUNICATOR_MIB = 64  # of device memory each: tens to a hundred by NCCL's buffers, never measured here


def communicators(program: Program, model: ExecutionModel) -> frozenset[Communicator]:
    """Every communicator that this rank is a member of."""
    names: set[Communicator] = set()
    for step in program.instructions:
        if len(step.peers) > 1 and step.op == "reduce":
            names.add(("all-reduce", frozenset(step.peers)))
        elif len(step.peers) > 1 and step.op in COLLECTIVE:
            names.update(("cascade", group) for group in _sets(cascade_groups(step)) if program.rank in group)
        elif model.handoffs == "device" and step.op in ("send", "receive"):
            names.add(handoff_channel(step, program.rank))
    return frozenset(names)


def handoff_channel(step: Instruction, rank: int) -> Communicator:
    """That of a send or receive from device to device: from whom, to whom."""
    return ("handoff", rank, step.peers[0]) if step.op == "send" else ("handoff", step.peers[0], rank)


def communicator_gib(values: Values, program: Program, model: ExecutionModel) -> float:
    """GiB of device memory that this rank's communicators take; 0 on CPUs.

    The group of all ranks counts as one, and where something is trained its all-reduces as another at least: a planner
    asks before they are in the program.
    """
    cluster = values.module.cluster
    if cluster is None or cluster.world == 1 or cluster.attrs.get("device") == "cpu":
        return 0.0
    names = communicators(program, model)
    synchronised = any(name[0] == "all-reduce" for name in names)
    return (1 + len(names) + (bool(values.trained) and not synchronised)) * COMMUNICATOR_MIB / 1024


def cascade_groups(step: Instruction) -> tuple[tuple[int, ...], ...]:
    """Every group of several ranks in which the collectives of an encode, forward or denoise run; else none."""
    if len(step.peers) < 2:
        return ()
    if step.op == "encode":
        return (step.peers,)
    return subgroups(step.peers, *grid(step)) if step.op in ("forward", "denoise") else ()


def grid(step: Instruction) -> tuple[int, int]:
    """Ulysses and ring degree of a forward or denoise; all ranks exchange heads where it does not say."""
    degree = len(step.peers)
    ulysses = integer(step.attrs.get("ulysses", 1 if "ring" in step.attrs else degree))
    return ulysses, integer(step.attrs.get("ring", degree // ulysses))


@lru_cache(maxsize=8192)
def _sets(groups: tuple[tuple[int, ...], ...]) -> tuple[frozenset[int], ...]:
    """The same sets for every rank that asks."""
    return tuple(dict.fromkeys(map(frozenset, groups)))
