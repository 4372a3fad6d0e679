"""The communicators that a rank's program uses, and the memory they take beside the allocator's.

A group of ranks has one communicator for the collectives of cascades, whatever the order of its ranks. Gradient
all-reduces have their own, because they run beside those, and so has a cell that gathers its parameters. A
device-to-device handoff has one per direction.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TypeAlias

from arachnec.analysis.execution_model import ExecutionModel
from arachnec.analysis.uses import Values
from arachnec.ir.nodes import Instruction, Program, integer, integers
from arachnec.ir.parameter_cells import side_by_side

Communicator: TypeAlias = tuple[str, frozenset[int]] | tuple[str, int, int]

COLLECTIVE = ("encode", "forward", "denoise", "reduce")  # a backward uses its forward's
COMMUNICATOR_MIB = 64  # of device memory each: tens to a hundred by NCCL's buffers, never measured here


def communicators(program: Program, model: ExecutionModel) -> frozenset[Communicator]:
    """Every communicator that this rank is a member of."""
    names: set[Communicator] = set()
    for step in program.instructions:
        if len(step.peers) > 1 and step.op in COLLECTIVE:
            names.update(_of_group(step, program.rank))
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


def subgroups(ranks: tuple[int, ...], ulysses: int, ring: int) -> Iterator[tuple[int, ...]]:
    """Every group that a clip on ``ranks`` as a grid of ``ulysses`` x ``ring`` communicates in; with single ones."""
    yield ranks
    yield from (ranks[row * ulysses : (row + 1) * ulysses] for row in range(ring))
    yield from (ranks[column::ulysses] for column in range(ulysses))


def grid(step: Instruction) -> tuple[int, int]:
    """Ulysses and ring degree of a forward or denoise; all ranks exchange heads where it does not say."""
    degree = len(step.peers) // integer(step.attrs.get("side", 1))
    ulysses = integer(step.attrs.get("ulysses", 1 if "ring" in step.attrs else degree))
    return ulysses, integer(step.attrs.get("ring", degree // ulysses))


def _of_group(step: Instruction, rank: int) -> Iterator[Communicator]:
    if step.op == "reduce":
        yield "all-reduce", frozenset(step.peers)
    elif step.op == "encode":
        yield "cascade", frozenset(step.peers)
    else:
        side = integer(step.attrs.get("side", 1))
        for ranks in side_by_side(step.peers, side):
            yield from (("cascade", group) for group in _groups(ranks, *grid(step)) if rank in group)
        if "cell" in step.attrs:
            yield "cell", frozenset(integers(step.attrs["cell"]))


@lru_cache(maxsize=4096)
def _groups(ranks: tuple[int, ...], ulysses: int, ring: int) -> tuple[frozenset[int], ...]:
    """The groups of several ranks, each once: every rank of a cascade asks for the same."""
    return tuple(dict.fromkeys(frozenset(group) for group in subgroups(ranks, ulysses, ring) if len(group) > 1))
