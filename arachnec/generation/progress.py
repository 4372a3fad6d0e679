"""What a rank is doing in a program of requests: its instruction, the requests of it, and the denoising step.

As in training (``arachnec.runtime.step_progress``), and beyond that how far a ``denoise`` has come: a step of it that
does not end is told, not the whole segment. On a device the host may be some steps ahead of what runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from arachnec.data.requests import Request
from arachnec.ir.nodes import Cascade, Instruction, Module, quantity
from arachnec.ir.sampling import planned_steps
from arachnec.launch.phases import Place, Position, Timeouts
from arachnec.runtime.step_progress import Clock, StepProgress, named


@dataclass(frozen=True)
class _Inside:
    """A part of an instruction: what it is, since when, and whether it may take as long as it likes."""

    doing: str
    since: float
    waits: bool = False


class RequestProgress:
    """``limit``: how many seconds an instruction may take; of a ``denoise``, a step of it."""

    def __init__(
        self,
        module: Module,
        rank: int,
        requests: Sequence[Request],
        clock: Clock,
        limit: Callable[[Instruction], float],
    ) -> None:
        self._given = rank, requests, clock, limit
        self._inside: _Inside | None = None
        self._told: Callable[[Place], None] | None = None
        self.follow(module)

    def follow(self, module: Module) -> None:
        """From here on the rank carries out this program, which begins as the one before."""
        rank, requests, clock, limit = self._given
        self._instructions = StepProgress(module, rank, 0, dict(enumerate(requests)), clock, limit, "request")
        if self._told is not None:
            self._instructions.tell(self._told)

    def tell(self, to: Callable[[Place], None]) -> None:
        """From now on ``to`` is told of every instruction and denoising step that the host comes to."""
        self._told = to
        self._instructions.tell(to)

    def at(self, index: int) -> None:
        """The host has come to an instruction; behind the last it waits for what it has sent."""
        self._inside = None
        self._instructions.at(index)

    def step(self, number: int, count: int) -> None:
        """Inside a ``denoise`` it begins this step, from 0, of so many that the request has."""
        self._go_inside(_Inside(f"step {number + 1} of {count}", time.monotonic()))

    def result_of(self, request: Request) -> None:
        """It decodes and writes what a request has come to."""
        self._go_inside(_Inside(f"the result of {named([str(request.id)], 'request')}", time.monotonic()))

    @contextmanager
    def arriving(self) -> Iterator[None]:
        """Inside, it waits until its requests arrive, and for nobody."""
        self._go_inside(_Inside("before they arrive", time.monotonic(), waits=True))
        yield
        self._inside = None

    def _go_inside(self, inside: _Inside) -> None:
        self._inside = inside
        if self._told is not None:
            self._told(self.place())

    def place(self) -> Place:
        place, inside = self._instructions.place(), self._inside
        if inside is None:
            return place
        doing, seconds = f"{place.doing}, {inside.doing}", time.monotonic() - inside.since
        return msgspec.structs.replace(place, doing=doing, seconds=seconds, limit=None if inside.waits else place.limit)

    def awaited(self, rank: int, position: Position) -> Mapping[int, Position]:
        return self._instructions.awaited(rank, position)

    def work(self, rank: int, until: Position | None) -> str:
        return self._instructions.work(rank, until)


def instruction_limit(cascade: Cascade | None, instruction: Instruction, timeouts: Timeouts, *, applies: bool) -> float:
    """Seconds that an instruction may take; of a ``denoise``, one of its steps.

    ``applies``: planned times are those of this device. The program behind a ``replan`` may take as long as a plan.
    """
    if instruction.op == "replan":
        return timeouts.of_plan()
    time = instruction.attrs.get("time")
    steps = 1 if cascade is None else max(1, planned_steps(cascade))
    ms = 0.0 if time is None else quantity(time) / steps
    return timeouts.of_instruction(ms, 0.0, 0.0, applies=applies)
