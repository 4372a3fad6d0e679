"""Receive prefetch: where in a rank's list each receive is started.

A transfer runs once both sides have started it. A receive that starts ahead of its place lets a rank get its next input
while it still computes. Order and memory limit how far ahead; from device to device, also what the send depends on.
``check``, the simulator and the executor all ask this file.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import TypeAlias

from arachnec.analysis.communicators import HOST_HANDOFFS, ExecutionModel, communicator_gib
from arachnec.analysis.handoff_order import HandoffOrder
from arachnec.analysis.memory import held, state_of
from arachnec.analysis.uses import Values, gib
from arachnec.ir.nodes import Instruction, Program

Prefetched: TypeAlias = tuple[tuple[Instruction, ...], ...]
"""For each instruction of a program, the receives to start before it."""


def prefetched_receives(values: Values, model: ExecutionModel, limit: float) -> dict[int, Prefetched]:
    """Where every rank starts its receives under an execution model, by rank.

    ``limit`` is the device's memory in GiB. Where receives follow what their sends depend on, the module must pass
    ``check`` with receives in place.
    """
    programs = values.module.programs
    if model.receives == "prefetched":
        return {program.rank: prefetch_receives(values, program, limit) for program in programs}
    if model.receives == "in-place":
        return {program.rank: in_place(program) for program in programs}
    return HandoffOrder(values, {p.rank: planned_memory(values, p) for p in programs}, limit).run()


def in_place(program: Program) -> Prefetched:
    """Every receive where it stands."""
    return tuple((step,) if step.op == "receive" else () for step in program.instructions)


def prefetch_receives(values: Values, program: Program, limit: float, encoded: Collection[str] = ()) -> Prefetched:
    """For each instruction, the receives to start before it: each as early as order and memory allow.

    ``limit`` is the device's memory in GiB. A receive moves ahead while the rank's planned memory with its buffer stays
    under the limit at every instruction in between. Receives never pass one another: per pair of ranks the proved
    order stays. Nor do they pass a ``replan``, behind which other instructions may stand. ``encoded`` are the cascades
    that were encoded before the program starts.
    """
    steps = program.instructions
    planned = list(planned_memory(values, program, encoded))
    prefetched: list[list[Instruction]] = [[] for _ in steps]
    receives = [step for step in steps if step.op == "receive"]
    fenced = any(step.op == "replan" for step in steps)
    if receives and not fenced and max(planned) + math.fsum(gib(step, "memory") for step in receives) <= limit:
        return (tuple(receives), *((),) * (len(steps) - 1))  # room for all of them at once
    earliest = 0
    for index, step in enumerate(steps):
        if step.op == "replan":
            earliest = index + 1
        if step.op != "receive":
            continue
        size = gib(step, "memory")
        place = index
        while place > earliest and planned[place - 1] + size <= limit:
            place -= 1
            planned[place] += size
        prefetched[place].append(step)
        earliest = place
    return tuple(tuple(receives) for receives in prefetched)


def planned_memory(values: Values, program: Program, encoded: Collection[str] = ()) -> tuple[float, ...]:
    """GiB on this rank while each instruction runs, as ``check`` counts them.

    ``encoded`` are the cascades that were encoded before the program starts.
    """
    always = state_of(program) + communicator_gib(values, program, HOST_HANDOFFS)
    if not encoded:
        return tuple(always + sum(parts) for parts in held(values, program))
    early = {step.target: gib(step, "memory") for step in program.instructions if _is_encoded(step, encoded)}
    totals = []
    for step, parts in zip(program.instructions, held(values, program), strict=True):
        if _is_encoded(step, encoded):
            del early[step.target]
        totals.append(always + sum(parts) + math.fsum(early.values()))
    return tuple(totals)


def _is_encoded(step: Instruction, encoded: Collection[str]) -> bool:
    return step.op == "encode" and step.target in encoded
