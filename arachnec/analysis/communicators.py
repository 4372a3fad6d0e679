"""The communicators that a rank's program uses, and the memory they take beside the allocator's.

A group of ranks has one communicator for the collectives of cascades, whatever the order of its ranks. Gradient
all-reduces have their own, because they run beside those. A device-to-device handoff has one per direction.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from arachnec.analysis.execution_model import ExecutionModel
from arachnec.ir.nodes import Cluster, Instruction, Program, integer

Communicator: TypeAlias = tuple[str, frozenset[int]] | tuple[str, int, int]

COMMUNICATOR_MIB = 64  # of device memory each: tens to a hundred by NCCL's buffers, never measured here


def communicators(program: Program, model: ExecutionModel) -> frozenset[Communicator]:
    """Every communicator that this rank is a member of."""
    return frozenset(name for step in program.instructions for name in _of(step, program.rank, model))


def communicator_gib(cluster: Cluster | None, program: Program, model: ExecutionModel) -> float:
    """GiB of device memory that this rank's communicators take; 0 on CPUs. The group of all ranks counts as one."""
    if cluster is None or cluster.world == 1 or cluster.attrs.get("device") == "cpu":
        return 0.0
    return (1 + len(communicators(program, model))) * COMMUNICATOR_MIB / 1024


def subgroups(ranks: tuple[int, ...], ulysses: int, ring: int) -> Iterator[tuple[int, ...]]:
    """Every group that a cascade on ``ranks`` as a grid of ``ulysses`` x ``ring`` communicates in; with single ones."""
    yield ranks
    yield from (ranks[row * ulysses : (row + 1) * ulysses] for row in range(ring))
    yield from (ranks[column::ulysses] for column in range(ulysses))


def grid(step: Instruction) -> tuple[int, int]:
    """Ulysses and ring degree of a forward or denoise; all ranks exchange heads where it does not say."""
    degree = len(step.peers)
    ulysses = integer(step.attrs.get("ulysses", 1 if "ring" in step.attrs else degree))
    return ulysses, integer(step.attrs.get("ring", degree // ulysses))


def _of(step: Instruction, rank: int, model: ExecutionModel) -> Iterator[Communicator]:
    if step.op in ("send", "receive"):
        if model.handoffs == "device":
            yield ("handoff", rank, step.peers[0]) if step.op == "send" else ("handoff", step.peers[0], rank)
    elif len(step.peers) < 2:
        return
    elif step.op == "reduce":
        yield "all-reduce", frozenset(step.peers)
    elif step.op == "encode":
        yield "cascade", frozenset(step.peers)
    elif step.op in ("forward", "denoise"):
        groups = subgroups(step.peers, *grid(step))
        yield from (("cascade", frozenset(group)) for group in groups if len(group) > 1 and rank in group)
