"""The plan of each step on every rank: made, shared as text, parsed and proved while the step before runs.

All that happens in a thread beside the one that trains, over connections of its own, so that a step waits for its plan
only where planning takes longer than the step before.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch.distributed as dist

from arachnec.backends.torch_distributed.agreement import share_text
from arachnec.backends.torch_distributed.background_planner import BackgroundPlanner, cluster_for
from arachnec.backends.torch_distributed.supported import demand_supported
from arachnec.executable.folder import Executable
from arachnec.executable.program_input import demand_own_input
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Module
from arachnec.ir.parser import parse_module
from arachnec.ir.printer import print_module
from arachnec.ir.verify import verify
from arachnec.launch.timeouts import GROUP_TIMEOUT
from arachnec.passes.check import Check

KEPT = 256
CLOSE_S = 5.0


class Plans:
    """Hands out checked programs. All ranks make it together, and ask for the same numbers in the same order."""

    def __init__(self, executable: Executable, rank: int, world: int) -> None:
        self._rank = rank
        self._executable = executable
        traced = executable.traced.cluster
        assert traced is not None
        self._cluster = cluster_for(traced, world)
        self._plans: dict[int, Future[Module]] = {}
        program = executable.program
        fits = program.cluster is not None and program.cluster.world == world
        self._compiled = print_module(program) if fits else None
        replans = executable.header.iterations > 1 or not fits
        self._group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT) if replans else None
        self._planner = BackgroundPlanner(executable.folder, world) if rank == 0 and replans else None
        self._thread = ThreadPoolExecutor(1, "plans")
        self._closing = False

    def get(self, number: int) -> Module:
        """The program of iteration ``number``, waited for if need be.

        Raises ``UserError`` for a plan that cannot be made or that does not check.
        """
        self.prepare(number)
        return self._plans[number].result()

    def get_ready(self, number: int) -> Module | None:
        """The program of a later iteration where this rank has proved it by now. A mistake is left for ``get``."""
        plan = self._plans.get(number)
        return plan.result() if plan is not None and plan.done() and plan.exception() is None else None

    def prepare(self, number: int) -> None:
        """Have iteration ``number`` planned and proved in the background, after what was asked for before."""
        if number in self._plans:
            return
        if len(self._plans) >= KEPT:
            self._plans.pop(next(iter(self._plans)))
        if self._planner is not None and not self._is_compiled(number):
            self._planner.ask(number)
        self._plans[number] = self._thread.submit(self._proved, number)

    def close(self) -> None:
        """End the planner. Plans that were asked for and not used are given up, on all ranks."""
        self._closing = True
        if self._planner is not None:
            self._planner.close()
        for plan in self._plans.values():
            plan.cancel()
        wait(self._plans.values(), CLOSE_S)
        self._thread.shutdown(wait=False)

    def _proved(self, number: int) -> Module:
        text = self._compiled if self._is_compiled(number) else self._shared(number)
        module = checked_program(text or "", f"iteration {number}")
        demand_own_input(self._executable, module, number, self._cluster)
        return module

    def _shared(self, number: int) -> str:
        if self._planner is None:
            return share_text(None, self._group)
        try:
            text = self._planner.fetch(number)
        except UserError:
            if self._closing:
                share_text("", self._group)  # the other ranks wait for it
            raise
        return share_text(text, self._group)

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
