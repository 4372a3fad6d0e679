"""Passes of a researcher's own: every cascade gets the degree, the grid and the shards that a list says."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import ClassVar

from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Level, Module, Reduce, Step
from arachnec.ir.values import Attributes, Quantity
from arachnec.passes.infra.base import Pass


@dataclass(frozen=True)
class Assign(Pass):
    """Degrees in turn, each cascade as early as that many ranks are free; every second one recomputes its blocks."""

    needs: ClassVar[Level] = Level.COSTED
    gives: ClassVar[Level] = Level.SCHEDULED

    degrees: tuple[int, ...] = (1,)
    recompute: bool = False

    def run(self, module: Module) -> Module:
        cost = CostModel(module)
        free = [0.0] * cost.cluster.world
        cascades, ends = [], {}
        degrees = itertools.cycle(self.degrees)
        for index, cascade in enumerate(module.cascades):
            degree = 1 if cascade.phase.value == "encode" else next(degrees)
            again = True if self.recompute and index % 2 else None
            ranks = sorted(range(len(free)), key=lambda rank: free[rank])[:degree]
            start = max([free[rank] for rank in ranks] + [ends[name] for name in cascade.inputs])
            ends[cascade.name] = end = start + cost.time(cascade, degree)
            for rank in ranks:
                free[rank] = end
            memory = Quantity(cost.memory(cascade, degree, cost.blocks(cascade) if again is True else 0), "GiB")
            cascade = cascade.with_attrs(degree=degree, start=Quantity(start, "ms"), end=Quantity(end, "ms"))
            cascades.append(cascade.with_attrs(recompute=again, memory=memory))
        trained = [stage.name for stage in module.stages if stage.trained]
        names = {stage: tuple(c.name for c in cascades if c.stage == stage) for stage in trained}
        return replace(
            module,
            level=Level.SCHEDULED,
            cascades=tuple(cascades),
            reductions=tuple(Reduce(stage, names[stage], Attributes()) for stage in trained),
            steps=tuple(Step(stage) for stage in trained),
            attrs=module.attrs.updated(
                makespan=Quantity(max(ends.values()), "ms"), bound=Quantity(0.0, "ms"), proved=False
            ),
        )


@dataclass(frozen=True)
class Regrid(Pass):
    """Ulysses degrees in turn, where they divide the cascade's degree; with ``skew``, shards as unequal as can be."""

    needs: ClassVar[Level] = Level.PLACED
    gives: ClassVar[Level] = Level.PLACED

    ulysses: tuple[int, ...] = (1,)
    skew: bool = False

    def run(self, module: Module) -> Module:
        wanted = itertools.cycle(self.ulysses)
        return replace(module, cascades=tuple(self._of(c, next(wanted)) for c in module.cascades))

    def _of(self, cascade, ulysses):
        if cascade.degree == 1 or cascade.phase.value == "encode":
            return cascade
        if cascade.degree % ulysses:
            ulysses = cascade.degree
        shards = None
        if self.skew:
            shares = [1, 5, 2, 3][: cascade.degree]
            cuts = [cascade.tokens * share // sum(shares) for share in shares[:-1]]
            shards = (*cuts, cascade.tokens - sum(cuts))
        return cascade.with_attrs(ulysses=ulysses, ring=cascade.degree // ulysses, shards=shards)
