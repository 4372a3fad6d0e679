"""Divide the weights of text encoders over cells of ranks, each with a part of the width of every block.

Shoeybi et al., "Megatron-LM" (arXiv 1909.08053), section 3. docs/encoders.md says what that needs and costs.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import ClassVar

from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.nodes import Level, Module
from arachnec.ir.parameter_cells import cell_fits
from arachnec.passes.infra.base import Count, Pass, Scope
from arachnec.passes.schedule_pipeline import SchedulePipeline
from arachnec.planning.encoder_width import dividable, divided, narrower, reasons_whole
from arachnec.planning.formulate import problem_of


@dataclass(frozen=True)
class DivideEncoders(Pass):
    """Divide the weights of encoders over cells of ranks, where they do not fit whole.

    ``ranks`` of a cell divide every encoder that can be. Without them the fewest ranks and encoders with which the
    first iteration fits, as the passes that follow cost it; where it fits, or nothing helps, all stay whole.
    """

    needs: ClassVar[Level] = Level.TRACED
    gives: ClassVar[Level] = Level.TRACED
    scope: ClassVar[Scope] = Scope.MODEL

    ranks: Count | None = None
    following: tuple[Pass, ...] = field(default=(), init=False, compare=False, repr=False)

    def informed(self, following: tuple[Pass, ...]) -> DivideEncoders:
        """Costs an iteration by the passes that follow."""
        informed = copy.copy(self)
        object.__setattr__(informed, "following", following)
        return informed

    def run(self, module: Module) -> Module:
        cluster = module.cluster
        if cluster is None:
            return module
        if self.ranks is None:
            return next((laid for laid in (module, *narrower(module)) if self._fits(laid)), module)
        able = dividable(module, self.ranks) if cell_fits(self.ranks, cluster.nodes, cluster.gpus) else []
        if not able or any(isinstance(step, SchedulePipeline) for step in self.following):
            reasons = "".join(f"; {reason}" for reason in reasons_whole(module))
            raise user_error(
                f"`divide-encoders{{ranks={self.ranks}}}` divides no encoder on {cluster.nodes} x {cluster.gpus} "
                f"ranks{reasons}",
                help=(
                    "`ranks` divide those of a machine, or are whole machines and divide all, and are at most the "
                    "encoder's heads, or groups of heads; a pipeline's encoders run on a rank each"
                ),
            )
        return divided(module, able, self.ranks)

    def _fits(self, module: Module) -> bool:
        first = min((clip.attrs.get("iteration", 0) for clip in module.clips), default=0)  # type: ignore[type-var]
        clips = tuple(clip for clip in module.clips if clip.attrs.get("iteration", 0) == first)
        costed = replace(module, clips=clips, graphs=())
        try:
            for step in self.following:
                if step.scope is Scope.ITERATION and step.gives <= Level.COSTED:
                    costed = step.run(costed)
            problem_of(costed, CostModel(costed))
        except UserError:
            return False
        return True
