"""The plan of each step on every rank: made, shared as text, parsed and proved while the step before runs.

All that happens in a thread beside the one that trains, over connections of its own, so that a step waits for its plan
only where planning takes longer than the step before.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch.distributed as dist

from arachnec.backends.torch_distributed.background_planner import BackgroundPlanner, Question, cluster_for
from arachnec.backends.torch_distributed.other_options import demand_room
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
from arachnec.runtime.agreement import share_text

Key = tuple[int, int]  # an iteration, and how often its links were measured anew
KEPT = 256
CLOSE_S = 5.0


class Plans:
    """Hands out checked programs. All ranks make it together, and ask for the same steps in the same order."""

    def __init__(self, executable: Executable, rank: int, world: int, more_state: float = 0.0) -> None:
        """``more_state`` is GiB that this run's options take on every rank, beyond what was planned."""
        self._more_state = more_state
        self._rank = rank
        self._executable = executable
        traced = executable.traced.cluster
        assert traced is not None
        self._cluster = cluster_for(traced, world)
        self._plans: dict[Key, Future[Module]] = {}
        self._links: list[tuple[int, Mapping[tuple[int, int], float]]] = []  # from which step on, and the speeds
        self._iterations = executable.header.iterations
        program = executable.program
        fits = program.cluster is not None and program.cluster.world == world
        self._compiled = print_module(program) if fits else None
        # where links choose the grouping, plans follow what is measured of them
        self.follows_links = "grouping" in program.attrs
        replans = executable.header.iterations > 1 or not fits or self.follows_links
        self._group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT) if replans else None
        self._planner = BackgroundPlanner(executable.folder, world) if rank == 0 and replans else None
        self._thread = ThreadPoolExecutor(1, "plans")
        self._closing = False

    def get(self, step: int) -> Module:
        """The program of a step, waited for if need be.

        Raises ``UserError`` for a plan that cannot be made or that does not check.
        """
        self.prepare(step)
        return self._plans[self._key(step)].result()

    def get_ready(self, step: int) -> Module | None:
        """The program of a later step where this rank has proved it by now. A mistake is left for ``get``."""
        plan = self._plans.get(self._key(step))
        return plan.result() if plan is not None and plan.done() and plan.exception() is None else None

    def prepare(self, step: int) -> None:
        """Have a step planned and proved in the background, after what was asked for before."""
        key = self._key(step)
        if key in self._plans:
            return
        if len(self._plans) >= KEPT:
            self._plans.pop(next(iter(self._plans)))
        if self._planner is not None and not self._is_compiled(key):
            self._planner.ask(self._question(key))
        self._plans[key] = self._thread.submit(self._proved, key)

    def follow(self, links: Mapping[tuple[int, int], float], step: int) -> None:
        """Plan for links of these GB/s from ``step`` on. All ranks say the same, before they ask for that step."""
        self._links.append((step, links))
        self.prepare(step)

    def _key(self, step: int) -> Key:
        """The iteration, and for which measurement of the links it is planned; 0 is the cluster as it was given."""
        return step % self._iterations, sum(step >= since for since, _ in self._links)

    def _question(self, key: Key) -> Question:
        iteration, version = key
        links = self._links[version - 1][1] if version else {}
        return Question(iteration, version, [(a, b, speed) for (a, b), speed in links.items()])

    def close(self) -> None:
        """End the planner. Plans that were asked for and not used are given up, on all ranks."""
        self._closing = True
        if self._planner is not None:
            self._planner.close()
        for plan in self._plans.values():
            plan.cancel()
        wait(self._plans.values(), CLOSE_S)
        self._thread.shutdown(wait=False)

    def _proved(self, key: Key) -> Module:
        text = self._compiled if self._is_compiled(key) else self._shared(key)
        module = checked_program(text or "", f"iteration {key[0]}")
        demand_own_input(self._executable, module, key[0], self._cluster)
        demand_room(module, self._more_state)
        return module

    def _shared(self, key: Key) -> str:
        if self._planner is None:
            return share_text(None, self._group)
        try:
            text = self._planner.fetch(self._question(key))
        except UserError:
            if self._closing:
                share_text("", self._group)  # the other ranks wait for it
            raise
        return share_text(text, self._group)

    def _is_compiled(self, key: Key) -> bool:
        return key == (0, 0) and self._compiled is not None


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
