"""When receives are posted: before the program comes to them, as far as order and memory allow.

A transfer runs once both sides are posted. So a rank that still computes may already be sent what it reads next, if it
has room for it.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from arachnec.ir.nodes import Instruction, Program, quantity


def posting_order(program: Program, limit: float, given: Collection[str] = ()) -> tuple[tuple[Instruction, ...], ...]:
    """For each instruction, the receives to post before it: each as early as order and memory allow.

    ``limit`` is the device's memory in GiB. A receive moves over what stands before it while the rank's planned memory,
    its buffer included, stays under the limit at every instruction in between; receives never pass one another, so
    the order per pair of ranks stays as it was proved. ``given`` are values that are there from the start.
    """
    steps = program.instructions
    held = list(planned_memory(program, given))
    posts: list[list[Instruction]] = [[] for _ in steps]
    receives = [step for step in steps if step.op == "receive"]
    if receives and max(held) + math.fsum(_gib(step, "memory") for step in receives) <= limit:
        return (tuple(receives), *((),) * (len(steps) - 1))  # room for all of them at once
    earliest = 0
    for index, step in enumerate(steps):
        if step.op != "receive":
            continue
        size = _gib(step, "memory")
        place = index
        while place > earliest and held[place - 1] + size <= limit:
            place -= 1
            held[place] += size
        posts[place].append(step)
        earliest = place
    return tuple(tuple(post) for post in posts)


def planned_memory(program: Program, given: Collection[str] = ()) -> tuple[float, ...]:
    """GiB on this rank while each instruction runs, by the program's own numbers.

    ``given`` are cascades that were encoded before the program starts.
    """
    current = quantity(program.attrs["state"]) if "state" in program.attrs else 0.0
    owned: dict[str, float] = {}
    activations: dict[str, float] = {}
    profile: list[float] = []
    for step in program.instructions:
        if step.op == "encode" and step.target in given:
            owned[step.target] = _gib(step, "memory")
    current += sum(owned.values())
    for step in program.instructions:
        if step.op == "encode" and step.target in given:
            pass
        elif step.op in ("encode", "receive", "denoise"):
            owned[step.target] = owned.get(step.target, 0.0) + _gib(step, "memory")
            current += _gib(step, "memory")
        elif step.op == "forward":
            activations[step.target] = _gib(step, "memory")
            current += activations[step.target]
        profile.append(current + _gib(step, "workspace"))
        if step.op == "backward":
            current -= activations.pop(step.target, 0.0)
        elif step.op == "free":
            current -= owned.pop(step.target, 0.0) + activations.pop(step.target, 0.0)
    return tuple(profile)


def _gib(step: Instruction, name: str) -> float:
    return quantity(step.attrs[name]) if name in step.attrs else 0.0
