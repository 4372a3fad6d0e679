"""Deal the optimizer's state out over the ranks where a copy on every rank would crowd the device.

Rajbhandari et al., "ZeRO" (arXiv 1910.02054), section 5.1: each parameter's moments and master copy lie on one rank,
which updates it and hands the result round. Parameters and gradients stay whole on every rank, so that cascades of any
degree on any ranks need nothing from the others while they run; the step moves once more the bytes of the parameters.

With the state known, the gradients' precision is too: fp32 where it fits (``arachnec.planning.gradient_precision``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from arachnec.ir.nodes import Level, Module, Stage, quantity
from arachnec.ir.values import Quantity
from arachnec.passes.infra.base import Pass, Scope
from arachnec.planning.gradient_precision import with_gradient_precision

CROWDED = 0.5  # of the device's memory, taken by state alone


@dataclass(frozen=True)
class ShardOptimizer(Pass):
    """Deal the optimizer's state out over all ranks where its copies would take more than half of a device."""

    needs: ClassVar[Level] = Level.TRACED
    gives: ClassVar[Level] = Level.TRACED
    scope: ClassVar[Scope] = Scope.MODEL

    def run(self, module: Module) -> Module:
        return with_gradient_precision(_sharded(module))


def _sharded(module: Module) -> Module:
    if module.cluster is None or module.cluster.world < 2:
        return module
    state = sum(quantity(stage.attrs["state"]) for stage in module.stages if "state" in stage.attrs)
    if state <= CROWDED * module.cluster.memory:
        return module
    return replace(module, stages=tuple(_dealt_out(stage, module.cluster.world) for stage in module.stages))


def _dealt_out(stage: Stage, ranks: int) -> Stage:
    if not stage.trained or "optimizer" not in stage.attrs or {"sharded", "cell"} & set(stage.attrs):
        return stage
    spared = quantity(stage.attrs["optimizer"]) * (1 - 1 / ranks)
    state = Quantity(quantity(stage.attrs["state"]) - spared, "GiB")
    return replace(stage, attrs=stage.attrs.updated(state=state, sharded=ranks))
