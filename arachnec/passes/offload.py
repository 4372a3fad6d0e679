"""Put a part of what devices do not hold into pinned host memory, to come and go layer by layer (docs/host_memory.md).

Ren et al., "ZeRO-Offload" (arXiv 2101.06840), for the optimizer; Rajbhandari et al., "ZeRO-Infinity" (arXiv
2104.07857), for parameters and the inputs of blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from arachnec.cluster.device_specs import stated_for, usable_host_memory
from arachnec.cost.model import CostModel
from arachnec.cost.table import Rows
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.host_placement import PLACED
from arachnec.ir.nodes import Level, Module, integer
from arachnec.ir.stage_sizes import gib
from arachnec.passes.annotate import Annotate
from arachnec.passes.infra.base import InformedPass, Scope
from arachnec.passes.infra.pipeline import plan_for_comparison
from arachnec.passes.partition import Partition
from arachnec.passes.shard_optimizer import CROWDED
from arachnec.planning.formulate import LacksMemory, problem_of
from arachnec.planning.gradient_precision import least_degrees
from arachnec.planning.host_choice import host_gib, with_host

CHOICES = ("auto", "none", *PLACED)


@dataclass(frozen=True)
class Offload(InformedPass):
    """Put optimizer, parameters, or inputs of blocks into host memory, as far as the clips need it.

    ``what`` is ``optimizer``; ``parameters``, which takes gradients and the optimizer along; ``inputs`` of blocks that
    run again, on top of these; ``none``; or ``auto`` for the first of them with which every clip fits: of a pipeline's
    stages, with which the first iteration can be scheduled by the passes that follow.
    """

    needs: ClassVar[Level] = Level.TRACED
    gives: ClassVar[Level] = Level.TRACED
    scope: ClassVar[Scope] = Scope.MODEL

    what: str = "auto"

    def run(self, module: Module) -> Module:
        if self.what not in CHOICES:
            choices_text = ", ".join(f"`{choice}`" for choice in CHOICES)
            raise user_error(
                f"`offload{{what={self.what}}}` puts nothing into host memory",
                help=f"`what` is one of {choices_text}; each comes with those before it",
            )
        if module.cluster is None or self.what == "none":
            return module
        usable = usable_host_memory(module.cluster)
        if self.what == "auto":
            return _as_needed(module, usable, self._staged if _in_parts(module) else _taken)
        placed = with_host(module, self.what)
        try:
            needed = host_gib(placed) if _in_parts(module) else _taken(placed)
        except UserError:
            return placed  # a clip that fits nowhere is refused where it is planned
        if needed > usable:
            raise user_error(
                f"`offload{{what={self.what}}}` takes {needed:.4g} GiB of a node's host, there are {usable:.4g}",
                help=(
                    f'give it `host_memory = "{stated_for(needed):.0f} GiB"`, of which a tenth stays free, or put '
                    "less there"
                ),
            )
        return placed

    def _staged(self, module: Module) -> float:
        """GiB of a node's host for a pipeline's stages. Raises UserError where its first iteration does not fit."""
        steps = [step for step in self.following if step.scope is Scope.ITERATION and step.gives <= Level.PLACED]
        plan_for_comparison(steps, first_iteration(module), Rows())
        return host_gib(module)


def _in_parts(module: Module) -> bool:
    """Whether the model is cut into stages, of which a pipeline holds more than one micro-batch."""
    return any("part_of" in stage.attrs for stage in module.stages)


def _as_needed(module: Module, usable: float, taken: Callable[[Module], float]) -> Module:
    """The module with as little in host memory as lets every clip fit; as it is where nothing does.

    ``taken`` are the GiB of a node's host that a module takes; it raises UserError where a clip fits nowhere. So does
    this where only more host memory would do, with how much.
    """
    if not _crowded(module):
        return module
    try:
        taken(module)
        return module
    except UserError as error:
        refusal = error
    least: float | None = None
    for what in PLACED:
        placed = with_host(module, what)
        try:
            needed = taken(placed)
        except UserError:
            continue
        if needed <= usable:
            return placed
        least = needed if least is None else min(least, needed)
    if least is None:
        return module
    raise with_host_remedy(refusal, stated_for(least)) from refusal


def _crowded(module: Module) -> bool:
    """Whether a clip may not fit: cheaper to tell than whether it does."""
    assert module.cluster is not None
    if not any(stage.trained and "state" in stage.attrs for stage in module.stages):
        return False
    in_parts = [gib(stage.attrs.get("state")) for stage in module.stages if "part_of" in stage.attrs]
    whole = sum(gib(stage.attrs.get("state")) for stage in module.stages if "part_of" not in stage.attrs)
    state = whole + max(in_parts, default=0.0)
    return state > CROWDED * module.cluster.memory or None in least_degrees(module)


def _taken(module: Module) -> float:
    """GiB of a node's host for the first iteration, by the defaults of what follows.

    Raises UserError where a clip fits nowhere.
    """
    costed = Annotate().run(Partition().run(first_iteration(module)))
    cost = CostModel(costed)
    problem_of(costed, cost)
    return host_gib(costed, cost)


def first_iteration(module: Module) -> Module:
    first = min((integer(clip.attrs.get("iteration", 0)) for clip in module.clips), default=0)
    clips = tuple(clip for clip in module.clips if clip.attrs.get("iteration", 0) == first)
    return replace(module, clips=clips, graphs=())


def with_host_remedy(error: UserError, stated: float) -> UserError:
    """The same refusal, which also says how much host memory would help."""
    words = f'give the cluster `host_memory = "{stated:.0f} GiB"`'
    diagnostics = (
        replace(found, help=f"{found.help}{found.joint}{words}") if isinstance(found, LacksMemory) else found
        for found in error.diagnostics
    )
    return UserError(*diagnostics)
