"""The plan of each step on every rank: made ahead, shared as text, parsed, checked, and kept where it recurs."""

from __future__ import annotations

import time

import torch

from arachnec.backends.executable import Executable
from arachnec.backends.torch_distributed.agreement import share_text
from arachnec.backends.torch_distributed.planning import BackgroundPlanner
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Module
from arachnec.ir.parser import parse_module
from arachnec.ir.printer import print_module
from arachnec.ir.verify import verify
from arachnec.passes.check import Check

KEPT = 256


class Plans:
    """Hands out checked programs; every rank calls ``get`` with the same numbers in the same order."""

    def __init__(self, executable: Executable, rank: int, world: int, device: torch.device) -> None:
        self._executable = executable
        self._rank = rank
        self._device = device
        self._kept: dict[int, Module] = {}
        program = executable.program
        fits = program.cluster is not None and program.cluster.world == world
        self._compiled = print_module(program) if fits else None
        several = executable.header.iterations > 1
        self._planner = BackgroundPlanner(executable.folder, world) if rank == 0 and (several or not fits) else None

    def get(self, number: int, following: int) -> tuple[Module, float]:
        """The program of iteration ``number``, and the ms that its step had to wait for it.

        Has ``following`` planned meanwhile. Raises ``UserError`` for a plan that cannot be made or that does not check.
        """
        started = time.perf_counter()
        module = self._kept.get(number)
        if module is None:
            text = self._text(number) if self._rank == 0 else None
            module = checked_program(share_text(text, self._device), f"iteration {number}")
            if len(self._kept) >= KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[number] = module
        waited = (time.perf_counter() - started) * 1e3
        if self._planner is not None and following not in self._kept and not self._is_compiled(following):
            self._planner.ask(following)
        return module, waited

    def close(self) -> None:
        if self._planner is not None:
            self._planner.close()

    def _text(self, number: int) -> str:
        if self._is_compiled(number):
            assert self._compiled is not None
            return self._compiled
        assert self._planner is not None
        return self._planner.fetch(number)

    def _is_compiled(self, number: int) -> bool:
        return number == 0 and self._compiled is not None


def checked_program(text: str, source: str) -> Module:
    """A lowered module that was parsed, verified and proved. Raises ``UserError`` with every problem found."""
    module = parse_module(text, source)
    problems = verify(module)
    if problems:
        raise UserError(*problems)
    return Check().run(module)
