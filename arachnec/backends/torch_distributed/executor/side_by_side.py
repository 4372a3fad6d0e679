"""What a rank does of a cascade of several clips side by side: the clips of its own group, on its ranks."""

from __future__ import annotations

from dataclasses import replace

from arachnec.ir.nodes import Cascade, Instruction, Program, integer
from arachnec.ir.parameter_cells import side_by_side


def own_part(cascade: Cascade, rank: int) -> Cascade:
    """The cascade with the rank's own clips and ranks; as it is where it has one group, or not this rank."""
    if cascade.side == 1 or rank not in cascade.ranks:
        return cascade
    number = cascade.ranks.index(rank) // cascade.degree
    count = len(cascade.clips) // cascade.side
    clips = cascade.clips[number * count : (number + 1) * count]
    ranks = side_by_side(cascade.ranks, cascade.side)[number]
    part = replace(cascade, clips=clips, batch=cascade.batch // cascade.side)
    return part.with_attrs(side=None, ranks=ranks)


def parts_of(instruction: Instruction) -> tuple[Instruction, ...]:
    """A forward or backward as each of its groups runs it."""
    side = integer(instruction.attrs.get("side", 1))
    if side == 1:
        return (instruction,)
    attrs = instruction.attrs.updated(side=None)
    return tuple(replace(instruction, peers=ranks, attrs=attrs) for ranks in side_by_side(instruction.peers, side))


def own_program(program: Program) -> Program:
    """A rank's program with the groups of its own clips; the same instructions otherwise."""
    forwards = {step.target: step for step in program.instructions if step.op == "forward" and "side" in step.attrs}
    if not forwards:
        return program
    return replace(program, instructions=tuple(_own(step, forwards, program.rank) for step in program.instructions))


def _own(step: Instruction, forwards: dict[str, Instruction], rank: int) -> Instruction:
    forward = forwards.get(step.target)
    if forward is None or step.op not in ("forward", "backward"):
        return step
    mine = next(part.peers for part in parts_of(forward) if rank in part.peers)
    return replace(step, peers=mine, attrs=step.attrs.updated(side=None))
