"""A program with another end. In: a lowered module, and placed cascades for what follows one of its rounds. Out: a
module whose lists begin as before.

Every rank's list up to the ``replan`` of the round is taken over as it stands, but for planned times; what follows is
lowered anew, from the values that a rank holds there. So a rank that has come to this ``replan`` may go on with the new
list.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from arachnec.analysis.stage_ranks import resident_ranks
from arachnec.analysis.uses import COMPUTE, Values
from arachnec.ir.nodes import Cascade, Instruction, Module
from arachnec.ir.values import Quantity
from arachnec.lowering.programs import lower, resident_by_rank

BEFORE = Quantity(-math.inf, "ms")  # the start of what was made in earlier rounds


def continued(module: Module, round: int, cascades: Sequence[Cascade]) -> Module:
    """``module`` with these cascades instead of its own from ``round`` on. They name their rounds, ``round`` or later.

    The cascades of earlier rounds are those of ``module``, their planned times may have changed. Raises UserError as
    ``lower`` does.
    """
    assert module.cluster is not None
    values, read = Values(module), {name for cascade in cascades for name in cascade.inputs}
    beginnings = {program.rank: beginning(program.instructions, round) for program in module.programs}
    held = {rank: values_held(values, steps) for rank, steps in beginnings.items()}
    earlier = [
        _held_by(cascade, round, [rank for rank in held if cascade.name in held[rank]])
        for cascade in module.cascades
        if cascade.name in read and cascade.round < round
    ]
    names = {cascade.name for cascade in earlier}
    rest = lower(replace(module, cascades=(*earlier, *cascades)))
    whole = replace(module, cascades=(*(c for c in module.cascades if c.round < round), *cascades))
    states = resident_by_rank(
        whole, {stage.name: resident_ranks(whole, module.cluster, stage) for stage in whole.stages}, "state"
    )
    programs, timed = [], {cascade.name: cascade for cascade in whole.cascades}
    for program in rest.programs:
        unread = [Instruction("free", name) for name in held[program.rank] if name not in names]
        steps = (step for step in program.instructions if not (step.op in COMPUTE and step.target in names))
        begun = (_at_its_time(step, timed) for step in beginnings[program.rank])
        instructions = (*begun, *unread, *steps)
        attrs = program.attrs.updated(state=Quantity(states[program.rank], "GiB"))
        programs.append(replace(program, instructions=instructions, attrs=attrs))
    return replace(whole, programs=tuple(programs))


def begins_as(instructions: Sequence[Instruction], before: Sequence[Instruction], round: int) -> bool:
    """Whether a rank that comes to ``replan`` of a round has done the same by both lists."""
    return [*map(_untimed, beginning(instructions, round))] == [*map(_untimed, beginning(before, round))]


def _untimed(step: Instruction) -> Instruction:
    return replace(step, attrs=step.attrs.updated(time=None, start=None))


def _at_its_time(step: Instruction, cascades: Mapping[str, Cascade]) -> Instruction:
    if "start" not in step.attrs:
        return step
    cascade = cascades[step.target]
    duration = Quantity(max(0.0, cascade.end - cascade.start), "ms")
    return replace(step, attrs=step.attrs.updated(start=cascade.attrs["start"], time=duration))


def beginning(instructions: Sequence[Instruction], round: int) -> tuple[Instruction, ...]:
    """A list up to the ``replan`` of a round."""
    place = next(n for n, step in enumerate(instructions) if step.op == "replan" and step.attrs.get("round") == round)
    return tuple(instructions[: place + 1])


def values_held(values: Values, instructions: Sequence[Instruction]) -> dict[str, None]:
    """The values that are on a rank behind these instructions, in the order in which they came."""
    held: dict[str, None] = {}
    for step in instructions:
        name = values.makes(step)
        if name is not None:
            held[name] = None
        if step.op == "free":
            held.pop(step.target, None)
    return held


def _held_by(cascade: Cascade, round: int, ranks: Sequence[int]) -> Cascade:
    """An earlier cascade as its value lies: on these ranks, before anything of the round."""
    kept = replace(cascade, inputs=(), attrs=cascade.attrs.updated(shards=None, ulysses=None, ring=None))
    alone = kept.with_attrs(side=None, unconditional=None, sparse=None, heads=None, groups=None)
    return alone.with_attrs(round=round, start=BEFORE, ranks=tuple(ranks), degree=len(ranks))
