"""Rule 3: no rank is in two cascades at once, and every input is on the rank before it is used."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from arachnec.analysis.stage_handoffs import STAGED
from arachnec.analysis.uses import COMPUTE, Values, gib, written
from arachnec.ir.diagnostic import Diagnostic
from arachnec.ir.nodes import Instruction, Program, quantity

TOLERANCE_MS = 1e-3  # of planned times that were printed, added and subtracted


@dataclass(frozen=True)
class Overlap(Diagnostic):
    title = (
        "rank {rank} is in two cascades at once: `{instruction}` is planned at {start:g} ms, "
        "`{before}` until {until:g} ms"
    )
    label = "starts at {start:g} ms"
    help = "a rank does one thing at a time, in the order of its list"
    rank: int
    instruction: str
    before: str
    start: float
    until: float


@dataclass(frozen=True)
class MissingInput(Diagnostic):
    title = "rank {rank} has `{instruction}`, and %{value} is not there yet"
    label = "needs %{value}"
    help = "compute %{value} on rank {rank} or receive it, before this instruction"
    rank: int
    instruction: str
    value: str


@dataclass(frozen=True)
class UsedAfterFree(Diagnostic):
    title = "rank {rank} has `{instruction}`, and %{value} has been freed"
    label = "needs %{value}"
    help = "move `free %{value}` behind its last use on rank {rank}"
    rank: int
    instruction: str
    value: str


@dataclass(frozen=True)
class NothingSaved(Diagnostic):
    title = "rank {rank} has `{instruction}` before it has run %{source}"
    label = "reads what %{source} saves"
    help = "run %{source} on rank {rank} first, once"
    rank: int
    instruction: str
    source: str


@dataclass(frozen=True)
class AlreadyThere(Diagnostic):
    title = "rank {rank} has `{instruction}`, and %{value} is there already"
    label = "a second %{value}"
    help = "a rank gets a value once; behind a `replan` what it has freed may come again"
    rank: int
    instruction: str
    value: str


def check_inputs(values: Values) -> Iterator[Diagnostic]:
    for program in values.module.programs:
        yield from _times(program)
        yield from _presence(values, program)


def _times(program: Program) -> Iterator[Diagnostic]:
    before: Instruction | None = None
    until = 0.0
    for instruction in program.instructions:
        if instruction.op not in COMPUTE or "start" not in instruction.attrs:
            continue
        start = quantity(instruction.attrs["start"])
        if start < until - max(TOLERANCE_MS, 1e-9 * until):
            earlier = "the start of the iteration" if before is None else written(before)
            yield Overlap(instruction.span, program.rank, written(instruction), earlier, start, until)
        before, until = instruction, start + gib(instruction, "time")


def _presence(values: Values, program: Program) -> Iterator[Diagnostic]:
    held: set[str] = set()
    freed: set[str] = set()
    saved: set[str] = set()
    received: defaultdict[str, set[tuple[int, ...]]] = defaultdict(set)  # a value between stages may come in parts
    for instruction in program.instructions:
        if not held.issuperset(values.reads(instruction)) or not saved.issuperset(values.saved_reads(instruction)):
            yield from _needs(values, program.rank, instruction, held, freed, saved)
        if instruction.op == "replan":
            freed.clear()
        if instruction.op == "free":
            held.discard(instruction.target)
            freed.add(instruction.target)
        value = values.makes(instruction)
        if value is not None:
            part = instruction.op == "receive" and _in_parts(values, instruction)
            again = value in held and (not part or value not in received or instruction.peers in received[value])
            if again or value in freed:
                yield AlreadyThere(instruction.span, program.rank, written(instruction), value)
            held.add(value)
            if part:
                received[value].add(instruction.peers)
        if values.saves(instruction):
            saved.add(instruction.target)


def _in_parts(values: Values, receive: Instruction) -> bool:
    return values.cascades[receive.target].phase in STAGED


def _needs(
    values: Values, rank: int, instruction: Instruction, held: set[str], freed: set[str], saved: set[str]
) -> Iterator[Diagnostic]:
    for value in values.reads(instruction):
        if value in held:
            continue
        kind = UsedAfterFree if value in freed else MissingInput
        yield kind(instruction.span, rank, written(instruction), value)
    for source in values.saved_reads(instruction):
        if source not in saved:
            yield NothingSaved(instruction.span, rank, written(instruction), source)
