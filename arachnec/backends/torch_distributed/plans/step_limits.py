"""How long a step and each of its instructions may take, from the plan and from the steps before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from arachnec.backends.torch_distributed.plans.step_plans import PlanKey, Planned
from arachnec.executable.folder import Executable
from arachnec.ir.nodes import Instruction, quantity
from arachnec.launch.phases import Timeouts


@dataclass
class StepLimits:
    """``applies``: planned times are those of this device; ``compiles``: a plan's first step may compile kernels."""

    timeouts: Timeouts
    applies: bool
    compiles: bool
    _longest_ms: float = 0.0  # of the steps so far, but for the first of each plan
    _begun: set[PlanKey] = field(default_factory=set)  # plans that were carried out before

    @classmethod
    def of(cls, timeouts: Timeouts, executable: Executable, device: torch.device) -> StepLimits:
        on_cpu = device.type == "cpu"
        return cls(timeouts, planned_for_cpu(executable) or not on_cpu, not on_cpu)

    def of_step(self, planned: Planned) -> float:
        """Seconds. A plan's first step may take as long beyond its own limit as the start may."""
        first = 0.0 if planned.key in self._begun else self.timeouts.of_start(planned.module)
        return self.timeouts.of_step(planned.times.ends, self._longest_ms, first=first, applies=self.applies)

    def of_instructions(self, planned: Planned) -> Callable[[Instruction], float]:
        """Seconds for every instruction of a step that is about to begin."""
        compiles = self.compiles and planned.key not in self._begun
        first = self.timeouts.of_start(planned.module) if compiles else 0.0

        def limit(instruction: Instruction) -> float:
            time = instruction.attrs.get("time")
            ms = 0.0 if time is None else quantity(time)
            return self.timeouts.of_instruction(
                ms, self._longest_ms, planned.times.ends, first=first, applies=self.applies
            )

        return limit

    def took(self, planned: Planned, ms: float) -> None:
        """Note what a step took."""
        if planned.key in self._begun:
            self._longest_ms = max(self._longest_ms, ms)
        self._begun.add(planned.key)


def planned_for_cpu(executable: Executable) -> bool:
    """Whether the executable's cluster is one of CPUs."""
    cluster = executable.program.cluster
    return cluster is not None and cluster.attrs.get("device") == "cpu"
