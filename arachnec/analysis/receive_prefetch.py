"""When receives are posted: before the program comes to them, as far as order and memory allow.

A transfer runs once both sides are posted. So a rank that still computes may already be sent what it reads next, if it
has room for it.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from arachnec.analysis.memory import usages
from arachnec.analysis.uses import Values, gib
from arachnec.ir.nodes import Instruction, Program


def posting_order(
    values: Values, program: Program, limit: float, given: Collection[str] = ()
) -> tuple[tuple[Instruction, ...], ...]:
    """For each instruction, the receives to post before it: each as early as order and memory allow.

    ``limit`` is the device's memory in GiB. A receive moves over what stands before it while the rank's planned memory,
    its buffer included, stays under the limit at every instruction in between; receives never pass one another, so
    the order per pair of ranks stays as it was proved. ``given`` are values that are there from the start.
    """
    steps = program.instructions
    held = list(planned_memory(values, program, given))
    posts: list[list[Instruction]] = [[] for _ in steps]
    receives = [step for step in steps if step.op == "receive"]
    if receives and max(held) + math.fsum(gib(step, "memory") for step in receives) <= limit:
        return (tuple(receives), *((),) * (len(steps) - 1))  # room for all of them at once
    earliest = 0
    for index, step in enumerate(steps):
        if step.op != "receive":
            continue
        size = gib(step, "memory")
        place = index
        while place > earliest and held[place - 1] + size <= limit:
            place -= 1
            held[place] += size
        posts[place].append(step)
        earliest = place
    return tuple(tuple(post) for post in posts)


def planned_memory(values: Values, program: Program, given: Collection[str] = ()) -> tuple[float, ...]:
    """GiB on this rank while each instruction runs, as ``check`` counts them.

    ``given`` are cascades that were encoded before the program starts.
    """
    early = {step.target: gib(step, "memory") for step in program.instructions if _is_given(step, given)}
    found = []
    for usage in usages(values, program):
        if usage.index < 0:
            continue
        step = program.instructions[usage.index]
        if _is_given(step, given):
            del early[step.target]
        found.append(usage.total + math.fsum(early.values()))
    return tuple(found)


def _is_given(step: Instruction, given: Collection[str]) -> bool:
    return step.op == "encode" and step.target in given
