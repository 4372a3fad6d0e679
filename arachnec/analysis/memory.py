"""A rank's memory while each of its instructions runs, by purpose."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from arachnec.analysis.communicators import HOST_HANDOFFS, ExecutionModel, communicator_gib
from arachnec.analysis.gathers import Gathers
from arachnec.analysis.uses import Values, gib
from arachnec.ir.nodes import Program, quantity
from arachnec.ir.stage_sizes import evaluated


@dataclass(frozen=True)
class Usage:
    """GiB on one rank while one of its instructions runs, by purpose."""

    rank: int
    index: int  # of the instruction in the rank's list; -1 before the first
    state: float
    saved: float = 0.0
    values: float = 0.0
    workspace: float = 0.0
    gathered: float = 0.0  # layers that are whole here for now, and gradients of them, where parameters are dealt out
    communicators: float = 0.0  # beside the allocator's memory; none on CPUs

    @property
    def total(self) -> float:
        return self.state + self.saved + self.values + self.workspace + self.communicators + self.gathered


def high_water(values: Values, program: Program, model: ExecutionModel = HOST_HANDOFFS) -> Usage:
    """The instruction at which a rank holds most, and how much."""
    peak, most, parts = -1, 0.0, (0.0, 0.0, 0.0, 0.0)
    for index, during in enumerate(held(values, program)):
        total = during[0] + during[1] + during[2] + during[3]
        if total > most:
            peak, most, parts = index, total, during
    return Usage(program.rank, peak, state_of(program), *parts, communicator_gib(values, program, model))


def usages(values: Values, program: Program, model: ExecutionModel = HOST_HANDOFFS) -> Iterator[Usage]:
    """What a rank holds during every instruction of its list, in order.

    The batch of the next forward is made while the one before runs: among the values.
    """
    state, communicators = state_of(program), communicator_gib(values, program, model)
    yield Usage(program.rank, -1, state, communicators=communicators)
    for index, parts in enumerate(held(values, program)):
        yield Usage(program.rank, index, state, *parts, communicators)


def state_of(program: Program) -> float:
    """GiB of the parameters, gradients and optimizer that lie on a rank throughout."""
    return quantity(program.attrs["state"]) if "state" in program.attrs else 0.0


def held(values: Values, program: Program) -> Iterator[tuple[float, float, float, float]]:
    """GiB saved, of values, of workspace and of gathered layers during every instruction, in order: what comes and
    goes."""
    last = values.last_saved_reads(program)
    prepared = _prepared(values, program)
    saved: dict[str, float] = {}
    present: dict[str, float] = {}
    in_saved = in_values = 0.0
    gathers = Gathers(values)
    for index, instruction in enumerate(program.instructions):
        target, memory, workspace = instruction.target, gib(instruction, "memory"), gib(instruction, "workspace")
        if values.saves(instruction):
            in_saved += memory - saved.get(target, 0.0)
            saved[target] = memory
        elif instruction.op == "receive":  # a value may come in parts
            in_values += memory
            present[target] = present.get(target, 0.0) + memory
        elif values.makes(instruction) is not None:
            in_values += memory - present.get(target, 0.0)
            present[target] = memory
        else:
            workspace += memory
        yield in_saved, in_values + prepared[index], workspace, gathers.at(instruction)
        for source in values.saved_reads(instruction):
            if last.get(source) == index:
                in_saved -= saved.pop(source, 0.0)
        # A backward that no weight reads keeps nothing.
        if instruction.op == "backward" and last.get(target, -1) <= index:
            in_saved -= saved.pop(target, 0.0)
        if instruction.op == "free":
            in_values -= present.pop(target, 0.0)


def _prepared(values: Values, program: Program) -> list[float]:
    """For every instruction, GiB of the batch of the next forward behind it."""
    sizes = []
    size = 0.0
    for instruction in reversed(program.instructions):
        sizes.append(size)
        if instruction.op == "forward":
            cascade = values.cascades[instruction.target]
            size = evaluated(values.module.stage(cascade.stage), "batch", cascade)
    return sizes[::-1]
