"""What a device has of streams and hardware queues, and what a rank's program asks of them.

Every communicator runs on a stream of its own, until torch's pool is used up and two of them share one. Every kernel
that spins, waiting for other ranks, holds a hardware queue; a device with none left starts nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from arachnec.analysis.communicators import Communicator, communicators, handoff_channel
from arachnec.analysis.execution_model import HARDWARE_QUEUES, STREAMS, ExecutionModel
from arachnec.analysis.receive_prefetch import Prefetched
from arachnec.analysis.uses import Values, written
from arachnec.ir.diagnostic import Diagnostic
from arachnec.ir.nodes import Instruction, Program


@dataclass(frozen=True)
class TooManyStreams(Diagnostic):
    title = "rank {rank} needs {count} communicators, and there are {limit} streams for them"
    label = "in this program"
    help = "run its cascades on fewer different groups of ranks"
    rank: int
    count: int
    limit: int


@dataclass(frozen=True)
class TooManyPending(Diagnostic):
    title = "rank {rank} has {count} kernels waiting for other ranks in `{instruction}`"
    label = "one more waits here"
    help = (
        "a device has {queues} hardware queues, and one must be left to compute: post fewer receives ahead, or hand "
        "over on the host's network"
    )
    rank: int
    count: int
    instruction: str
    queues: int


def check_device_limits(
    values: Values, model: ExecutionModel, posted: Mapping[int, Prefetched]
) -> Iterator[Diagnostic]:
    """At most ``STREAMS`` communicators, and one hardware queue free of kernels that spin, on every rank with a device.

    CPUs have neither. ``posted`` is where each rank starts its receives; it is read only where they occupy the device.
    """
    cluster = values.module.cluster
    if cluster is None or cluster.attrs.get("device") == "cpu":
        return
    for program in values.module.programs:
        count = len(communicators(program, model))
        if count > STREAMS:
            yield TooManyStreams(program.span, program.rank, count, STREAMS)
        receives = posted[program.rank] if model.handoffs == "device" else ((),) * len(program.instructions)
        yield from _pending(values, model, program, receives)


def _pending(values: Values, model: ExecutionModel, program: Program, posted: Prefetched) -> Iterator[TooManyPending]:
    """Where too many communicators have a kernel that may wait for another rank."""
    pending: dict[str, set[Communicator]] = {}  # the communicators, by the value or stage that is under way on them
    for step, receives in zip(program.instructions, posted, strict=True):
        begun = (*receives, step) if receives else (step,)
        started = [(one.target, name) for one in begun for name in _starts(one, program.rank, model)]
        for target, name in started:
            pending.setdefault(target, set()).add(name)
        busy = set().union(*pending.values()) if started else set()
        if len(busy) >= HARDWARE_QUEUES:
            yield TooManyPending(step.span, program.rank, len(busy), written(step), HARDWARE_QUEUES)
            return
        for target in _waits(values, step) if pending else ():
            pending.pop(target, None)


def _starts(step: Instruction, rank: int, model: ExecutionModel) -> Iterator[Communicator]:
    """The communicator on which an instruction leaves a kernel behind that it does not wait for."""
    if step.op in ("gather", "reduce") and len(step.peers) > 1:
        yield "all-reduce", frozenset(step.peers)
    elif model.handoffs == "device" and step.op in ("send", "receive"):
        yield handoff_channel(step, rank)


def _waits(values: Values, step: Instruction) -> tuple[str, ...]:
    """The values and stages whose communication is over once the instruction has run."""
    if step.op in ("step", "free"):
        return (step.target,)
    if step.op == "forward":  # it reads what was gathered of its stage
        return (*values.reads(step), values.cascades[step.target].stage)
    return () if step.op == "send" else values.reads(step)
