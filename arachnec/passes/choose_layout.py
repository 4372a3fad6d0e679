"""Choose how the model's state lies on the ranks: on every one, in cells, or in stages (``planning.layouts``).

The choice holds for a run. It is made on a sample: the first iteration, and the one with the longest clip. Layouts are
planned by the passes that follow and simulated, in the order of what they take at least (``planning.layout_bound``).
One that takes longer at least than the best so far is not planned. Where none fits, text encoders are divided by width
(``planning.encoder_width``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from arachnec.analysis.uses import Values
from arachnec.cost.communication import reduce_time
from arachnec.cost.table import Rows
from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.long_computations import Reporter, unreported
from arachnec.ir.nodes import Clip, Level, Module, integer
from arachnec.ir.tensor_parallel import divided_encoders
from arachnec.ir.values import Quantity
from arachnec.passes.annotate import Annotate
from arachnec.passes.bucket import Bucket
from arachnec.passes.infra.base import CountFromZero, InformedPass, Pass, Scope
from arachnec.passes.infra.pipeline import follows_layout, plan_for_comparison
from arachnec.passes.lower import Lower
from arachnec.passes.offload import Offload
from arachnec.passes.partition import Partition
from arachnec.passes.place import Place
from arachnec.passes.schedule_z3 import ScheduleZ3
from arachnec.passes.shard_optimizer import ShardOptimizer, spread
from arachnec.passes.stages import Stages
from arachnec.planning.encoder_width import narrower, narrowest
from arachnec.planning.gradient_precision import least_degrees
from arachnec.planning.layout_bound import least_ms
from arachnec.planning.layout_refusal import demand_fits, may_fit
from arachnec.planning.layouts import (
    DEFAULT_STEPS,
    REPLICATED,
    SEARCH_STEPS,
    Candidate,
    Choice,
    Layout,
    anchors,
    bounding_steps,
    in_cells,
    layouts,
    planning_steps,
    shortest,
)
from arachnec.simulation.events import Engine

BOUNDED = 2  # times the steps of planning, for bounds of all layouts
HIDDEN = 0.5  # of the iterations, that all-reduces may take before other layouts are looked at
DEFAULTS: tuple[Pass, ...] = (Partition(policy="dual"), Annotate(), ScheduleZ3(), Place(), Bucket(), Lower())


@dataclass(frozen=True)
class ChooseLayout(InformedPass):
    """Deal the model out over cells or stages where that shortens the iteration, or where nothing else fits.

    Where a copy of the state on every rank takes less than half of a device, and its all-reduces less than half of the
    iteration, no other layout is looked at. ``layout`` names the one to take; a module that names one keeps it.
    """

    needs: ClassVar[Level] = Level.TRACED
    gives: ClassVar[Level] = Level.TRACED
    scope: ClassVar[Scope] = Scope.MODEL

    layout: str | None = None
    steps: CountFromZero = DEFAULT_STEPS

    def run(self, module: Module) -> Module:
        return self.run_reporting(module, unreported)

    def run_reporting(self, module: Module, reporter: Reporter) -> Module:
        if module.cluster is None or any({"sharded", "cell", "part_of"} & set(s.attrs) for s in module.stages):
            return module
        held = self.layout or module.attrs.get("layout")
        if held is not None:
            return _held(module, str(held))
        replicated, rows = applied(module, Layout()), Rows()
        crowded = any("sharded" in stage.attrs for stage in replicated.stages)
        if not crowded and None not in least_degrees(replicated) and self._hidden(replicated, rows):
            return replicated
        choice = self._chosen(module, reporter, rows) or self._chosen_narrower(module, reporter)
        if choice is None:
            world = module.cluster.world
            together = applied(module, Layout(f"cells-{world}", cell=world))
            offloads = any(isinstance(step, Offload) for step in self.following)
            if offloads and Offload().run(together) is not together:  # it needs least host memory there
                return together
            demand_fits(narrowest(module))
            return replicated  # what follows says what is wrong
        return replace(
            choice.module,
            attrs=choice.module.attrs.updated(
                tried=_pairs(choice.times), excluded=_pairs(choice.bounds) or None, refused=choice.refused or None
            ),
        )

    @property
    def _passes(self) -> tuple[Pass, ...]:
        """What plans an iteration, the scheduler's search short and counted."""
        passes = [step for step in self.following if step.scope is Scope.ITERATION]
        ends = next((i for i, step in enumerate(passes) if isinstance(step, Lower)), None)
        steps = DEFAULTS if ends is None else tuple(passes[: ends + 1])
        return tuple(replace(step, steps=SEARCH_STEPS) if isinstance(step, ScheduleZ3) else step for step in steps)

    def _planned_ms(self, candidate: Candidate, rows: Rows) -> float:
        """Simulated ms of the sample. Raises UserError where it fits nowhere."""
        total, passes = 0.0, self._passes[len(self._costing) :]
        for costed in candidate.costed:
            planned = plan_for_comparison(passes, costed, rows)
            assert planned.cluster is not None
            engine = Engine(Values(planned), planned.cluster)
            engine.run()
            total += max((interval.end for interval in engine.intervals), default=0.0)
        return total

    def _chosen(self, module: Module, reporter: Reporter, rows: Rows) -> Choice | None:
        """The layout with the shortest sample; None where some clip fits in none."""
        assert module.cluster is not None
        any_layout = any(follows_layout(step) for step in self._passes)
        stages = any_layout and not divided_encoders(module)  # a pipeline's encoders run on a rank each
        table = [layout for layout in layouts(module) if layout.stages == 1 or stages]
        candidates, left = [], BOUNDED * self.steps
        placed: dict[Layout, Module] = {}
        for number, layout in enumerate(table, 1):
            left -= bounding_steps(module, layout)
            if left >= 0 or layout in anchors(module.cluster):
                reporter(f"bounding layout {number} of {len(table)}")
                candidates.append(self._candidate(module, layout, rows, placed))
        return shortest(candidates, partial(self._planned_ms, rows=rows), self.steps, reporter)

    def _chosen_narrower(self, module: Module, reporter: Reporter) -> Choice | None:
        """The same with encoders divided by width, as few of them over as few ranks as it takes."""
        candidates = (laid for laid in narrower(module) if may_fit(laid))
        return next(
            (choice for laid in candidates if (choice := self._chosen(laid, reporter, Rows())) is not None), None
        )

    def _candidate(self, module: Module, layout: Layout, rows: Rows, placed: dict[Layout, Module]) -> Candidate:
        assert module.cluster is not None
        laid = applied(module, layout, placed)
        costed, least = self._bounded(laid, rows)
        steps = sum(map(planning_steps, costed))
        return Candidate(layout, laid, least, costed, steps, layout in anchors(module.cluster))

    @property
    def _costing(self) -> tuple[Pass, ...]:
        return tuple(step for step in self._passes if step.gives <= Level.COSTED)

    def _bounded(self, module: Module, rows: Rows) -> tuple[tuple[Module, ...], float]:
        """The costed modules of the sample, and ms of it at least; infinite where a clip of it fits nowhere."""
        iterations = (replace(module, clips=clips, graphs=()) for clips in sample(module))
        try:
            costed = tuple(plan_for_comparison(self._costing, one, rows) for one in iterations)
            return costed, sum(least_ms(one, rows) for one in costed)
        except UserError:
            return (), math.inf

    def _hidden(self, replicated: Module, rows: Rows) -> bool:
        """Whether the cascades take long enough for the gradients' all-reduces to hide behind the last of them."""
        assert replicated.cluster is not None
        everyone = tuple(range(replicated.cluster.world))
        reduces = sum(reduce_time(replicated.cluster, stage, everyone) for stage in replicated.stages if stage.trained)
        return len(sample(replicated)) * reduces <= HIDDEN * self._bounded(replicated, rows)[1]


def applied(module: Module, layout: Layout, placed: dict[Layout, Module] | None = None) -> Module:
    """The traced module in a layout. ``placed`` are modules by where their state lies, filled and used."""
    where = Layout("", cell=layout.cell, spread=layout.spread, stages=layout.stages)
    placed = {} if placed is None else placed
    if where not in placed:
        placed[where] = _placed(module, where)
    laid = placed[where]
    if layout.stages > 1 or layout.cell > 1:
        said = laid.attrs.updated(layout=layout.name, schedule=layout.schedule, full=layout.full or None)
        return replace(laid, attrs=said)
    crowded = any("sharded" in stage.attrs for stage in laid.stages)
    return replace(laid, attrs=laid.attrs.updated(layout=REPLICATED)) if crowded else laid


def _placed(module: Module, layout: Layout) -> Module:
    """The traced module with its state where a layout puts it."""
    if layout.cell > 1:
        module = replace(module, stages=tuple(in_cells(stage, layout.cell) for stage in module.stages))
    if layout.stages > 1:
        module = Stages(p=layout.stages).run(module)
    return ShardOptimizer().run(spread(module) if layout.spread else module)


def sample(module: Module) -> Sequence[tuple[Clip, ...]]:
    """The clips of the first iteration, and of the one that has the longest clip."""
    iterations: dict[int, list[Clip]] = {}
    for clip in module.clips:
        iterations.setdefault(integer(clip.attrs.get("iteration", 0)), []).append(clip)
    if not iterations:
        return []
    longest = max(iterations, key=lambda number: max(clip.tokens for clip in iterations[number]))
    return [tuple(iterations[number]) for number in sorted({min(iterations), longest})]


def _held(module: Module, name: str) -> Module:
    table = {layout.name: layout for layout in layouts(module)}
    if name not in table:
        raise user_error(
            f"this model has no layout `{name}` on this cluster", help=f"its layouts are {', '.join(table)}"
        )
    return applied(module, table[name])


def _pairs(times: dict[str, float]) -> tuple[tuple[str, Quantity], ...]:
    return tuple((name, Quantity(round(ms, 3), "ms")) for name, ms in sorted(times.items(), key=lambda pair: pair[1]))
