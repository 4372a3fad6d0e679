"""The plan of each step on every rank: made ahead, shared as text, parsed, checked, and kept where it recurs."""

from __future__ import annotations

import torch

from arachnec.backends.torch_distributed.agreement import share_text
from arachnec.backends.torch_distributed.background_planner import BackgroundPlanner
from arachnec.backends.torch_distributed.supported import demand_supported
from arachnec.executable.folder import Executable
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Module
from arachnec.ir.parser import parse_module
from arachnec.ir.printer import print_module
from arachnec.ir.verify import verify
from arachnec.passes.check import Check

KEPT = 256


class Plans:
    """Hands out checked programs; every rank calls its methods with the same numbers in the same order."""

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

    def get(self, number: int) -> Module:
        """The program of iteration ``number``, waited for if need be.

        Raises ``UserError`` for a plan that cannot be made or that does not check.
        """
        module = self._kept.get(number)
        if module is None:
            text = self._text(number) if self._rank == 0 else None
            module = self._keep(number, share_text(text, self._device))
        return module

    def get_ready(self, number: int) -> Module | None:
        """The program of a later iteration where it has been made by now; the same answer on every rank."""
        if number not in self._kept:
            text = self._ready(number) if self._rank == 0 else None
            shared = share_text(text, self._device)
            return self._keep(number, shared) if shared else None
        return self._kept[number]

    def prepare(self, number: int) -> None:
        """Have iteration ``number`` planned in the background, after what was asked for before."""
        if self._planner is not None and number not in self._kept and not self._is_compiled(number):
            self._planner.ask(number)

    def _keep(self, number: int, text: str) -> Module:
        module = checked_program(text, f"iteration {number}")
        if len(self._kept) >= KEPT:
            self._kept.pop(next(iter(self._kept)))
        self._kept[number] = module
        return module

    def _ready(self, number: int) -> str | None:
        if self._is_compiled(number):
            return self._compiled
        assert self._planner is not None
        return self._planner.fetch_ready(number)

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
    """A lowered module that was parsed, verified and proved, and that this back end can run.

    Raises ``UserError`` with every problem found.
    """
    module = parse_module(text, source)
    problems = verify(module)
    if problems:
        raise UserError(*problems)
    module = Check().run(module)
    demand_supported(module, module.programs)
    return module
