"""A rank's step, instruction by instruction: when each began and ended, what runs now, and which ranks it waits for.

The thread that trains writes down its instruction, and leaves word of it for the case that its process is killed. The
watchdog's thread asks for the rest. On a device the host is ahead of what runs: the first instruction that the device
has not passed counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import msgspec

from arachnec.analysis.uses import READS_GRADIENTS
from arachnec.data.clip import VideoClip
from arachnec.ir.nodes import Cascade, Instruction, Module, Program
from arachnec.launch.phases import Place, Position

if TYPE_CHECKING:
    from arachnec.runtime.device_runtime import DeviceRuntime, Timer


class Interval(msgspec.Struct, frozen=True):
    """One instruction on one rank; ms from the start of the step."""

    rank: int
    op: str
    target: str
    start: float
    end: float


class Clock:
    """Measures without making anybody wait: moments are taken, and read at the end."""

    def __init__(self, rank: int, runtime: DeviceRuntime) -> None:
        self._rank = rank
        self._runtime = runtime
        self._zero = runtime.timer()
        self._marks: list[tuple[str, str, Timer, Timer]] = []
        self._passed = 0

    @contextmanager
    def measure(self, op: str, target: str) -> Iterator[None]:
        """Run inside what is measured; of what raises nothing is noted."""
        started = self.now()
        yield
        self.note(op, target, started)

    def now(self) -> Timer:
        return self._runtime.timer()

    def note(self, op: str, target: str, started: Timer) -> None:
        """Something has ended that began at a ``now``."""
        self._marks.append((op, target, started, self._runtime.timer()))

    def under_way(self) -> tuple[str, str] | None:
        """Of what was measured, the operation and target that the device is in; None where it has passed all. Nobody
        waits; one other thread may ask."""
        marks = self._marks
        while self._passed < len(marks) and marks[self._passed][3].passed():
            self._passed += 1
        return marks[self._passed][:2] if self._passed < len(marks) else None

    def intervals(self) -> list[Interval]:
        """All that was measured, in order. Waits for the device."""
        self._runtime.synchronize()
        zero = self._zero
        return [Interval(self._rank, op, target, a.since(zero), b.since(zero)) for op, target, a, b in self._marks]


TOGETHER = ("encode", "forward", "backward", "weight", "norm", "learn", "denoise")  # all of the group are in it at once
COMPUTES = ("forward", "backward", "weight", "denoise", "decode")
NAMED = 4


class Named(Protocol):
    """A clip or a request."""

    @property
    def name(self) -> str: ...


class StepProgress:
    """``limit``: how many seconds an instruction may take. ``noun``: what the module's clips are called."""

    def __init__(
        self,
        module: Module,
        rank: int,
        step: int,
        clips: Mapping[int, Named],
        clock: Clock,
        limit: Callable[[Instruction], float],
        noun: str = "clip",
    ) -> None:
        self._module = module
        self._rank = rank
        self._step = step
        self._clips = clips
        self._clock = clock
        self._limit = limit
        self._noun = noun
        self._at = (-1, time.monotonic())
        self._device_at = self._at
        self._ahead: tuple[str, float] | None = None
        self._told: Callable[[Place], None] | None = None

    def tell(self, to: Callable[[Place], None]) -> None:
        """From now on ``to`` is told of every instruction that the host comes to."""
        self._told = to

    def at(self, index: int) -> None:
        """The host has come to an instruction; behind the last it waits for the other ranks."""
        self._at = (index, time.monotonic())
        if self._told is not None:
            self._told(Place(position=Position(self._step, index), doing=self._doing(index)))

    @contextmanager
    def encoding_ahead(self, cascade: Cascade, clips: Sequence[VideoClip], step: int) -> Iterator[None]:
        """Inside, the host does something of a later step, with that step's clips, and waits for nobody."""
        names = named([clip.name for clip in clips])
        doing = f"encode %{cascade.name} of step {step} ({names})"
        self._ahead = doing, time.monotonic()
        if self._told is not None:
            self._told(Place(position=Position(self._step, self._at[0]), doing=doing))
        yield
        self._ahead = None

    def place(self) -> Place:
        if (ahead := self._ahead) is not None:
            doing, began = ahead
            limit = self._limit(Instruction("encode", ""))
            return Place(
                position=Position(self._step, self._at[0]), doing=doing, seconds=time.monotonic() - began, limit=limit
            )
        index, since = self._of_device() or self._at
        seconds = time.monotonic() - since
        instructions = self._program(self._rank).instructions
        last = Instruction("step", "")
        within = None if index < 0 else self._limit(instructions[index] if index < len(instructions) else last)
        return Place(position=Position(self._step, index), doing=self._doing(index), seconds=seconds, limit=within)

    def awaited(self, rank: int, position: Position) -> dict[int, Position]:
        """The positions that other ranks must have come to for ``rank`` to leave ``position``."""
        if position.step != self._step or position.instruction < 0 or rank not in self._programs:
            return {}
        if rank == self._rank and self._ahead is not None:
            return {}
        awaited: dict[int, Position] = {}
        for other, index in self._waits(rank, position.instruction):
            awaited[other] = max(awaited.get(other, Position(self._step, 0)), Position(self._step, index))
        return awaited

    def work(self, rank: int, until: Position | None) -> str:
        """The instructions with clips that ``rank`` has up to a position, or all of them, in words."""
        instructions = self._program(rank).instructions[: None if until is None else until.instruction + 1]
        own = [step for step in instructions if step.op in ("encode", *COMPUTES)] or list(instructions)
        return listed([described(step, self._cascades, self._clips, self._noun) for step in own]) or "nothing"

    def _doing(self, index: int) -> str:
        """What the rank does at this place in its program, in words."""
        instructions = self._program(self._rank).instructions
        if index < 0:
            return "its preparation"
        if index >= len(instructions):
            return "the end of the step"
        return described(instructions[index], self._cascades, self._clips, self._noun)

    def _of_device(self) -> tuple[int, float] | None:
        """The instruction that the device is in, and since when it was seen there; None where it is not behind."""
        under_way = self._clock.under_way()
        if under_way is None:
            return None
        op, target = under_way
        instructions = self._program(self._rank).instructions
        if op == "reduce":  # what takes time is to wait for it, before the step
            index = next((i for i, step in enumerate(instructions) if step.op in READS_GRADIENTS), None)
        elif op == "wait":
            readers = {cascade.name for cascade in self._module.cascades if target in cascade.inputs}
            index = next((i for i, s in enumerate(instructions) if s.op in COMPUTES and s.target in readers), None)
        else:
            index = next((i for i, step in enumerate(instructions) if (step.op, step.target) == under_way), None)
        if index is None or index >= self._at[0]:
            return None
        if index != self._device_at[0]:
            self._device_at = (index, time.monotonic())
        return self._device_at

    def _waits(self, rank: int, index: int) -> list[tuple[int, int]]:
        """Other ranks, and the place in their programs that they must have come to."""
        instructions = self._program(rank).instructions
        if index >= len(instructions):
            return [(other, len(p.instructions)) for other, p in self._programs.items() if other != rank]
        own, before = instructions[index], instructions[:index]
        waits: list[tuple[int, int]] = []
        if own.op in TOGETHER:
            waits += self._of_group(rank, own, 0)
        if own.op in COMPUTES:
            inputs = next((c.inputs for c in self._module.cascades if c.name == own.target), ())
            for receive in before:
                if receive.op == "receive" and receive.target in inputs:
                    sender = receive.peers[0]
                    waits.append((sender, self._place(sender, "send", receive.target, rank) + 1))
            waits += [wait for gather in before if gather.op == "gather" for wait in self._of_group(rank, gather, 1)]
        if own.op in READS_GRADIENTS:
            waits += [wait for reduce in before if reduce.op == "reduce" for wait in self._of_group(rank, reduce, 1)]
        if own.op == "free":
            sends = [step for step in before if step.op == "send"]
            waits += [(s.peers[0], self._place(s.peers[0], "receive", s.target, rank) + 1) for s in sends]
        return waits

    def _of_group(self, rank: int, own: Instruction, passed: int) -> list[tuple[int, int]]:
        return [(other, self._place(other, own.op, own.target) + passed) for other in own.peers if other != rank]

    def _place(self, rank: int, op: str, target: str, peer: int | None = None) -> int:
        """Where a rank's program has this instruction; -1 where it has none, which nobody waits for."""
        for index, step in enumerate(self._program(rank).instructions):
            if step.op == op and step.target == target and peer in (None, *step.peers):
                return index
        return -1

    def _program(self, rank: int) -> Program:
        return self._programs.get(rank, Program(rank, ()))

    @cached_property
    def _programs(self) -> dict[int, Program]:
        return {program.rank: program for program in self._module.programs}

    @cached_property
    def _cascades(self) -> dict[str, Cascade]:
        return {cascade.name: cascade for cascade in self._module.cascades}


def described(
    instruction: Instruction, cascades: Mapping[str, Cascade], clips: Mapping[int, Named], noun: str = "clip"
) -> str:
    """An instruction in words, with the clips of its cascade by their names."""
    cascade = cascades.get(instruction.target)
    if cascade is None:
        return f"{instruction.op} @{instruction.target}"
    peer = {"send": " to rank {}", "receive": " from rank {}"}.get(instruction.op, "").format(*instruction.peers[:1])
    return f"{instruction.op} %{cascade.name}{peer} ({named([clips[clip].name for clip in cascade.clips], noun)})"


def named(clips: list[str], noun: str = "clip") -> str:
    """Clips by name, the first few of them."""
    return f"{noun}{'' if len(clips) == 1 else 's'} {listed(clips)}"


def listed(names: Sequence[str]) -> str:
    """The first few of them."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"
