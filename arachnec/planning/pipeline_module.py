"""The module of a placed pipeline: its cascades with the makespan, the bound, and what ends the iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Cascade, Level, Module, Reduce, Step, quantity
from arachnec.ir.values import Attributes, Quantity
from arachnec.planning import lower_bounds
from arachnec.planning.formulate import has_gradient, problem_of
from arachnec.solver.problem import TICKS


def with_bound(plan: Module, cost: CostModel) -> Module:
    """A plan of the module of ``cost`` with the bound: before that no schedule of any kind ends."""
    problem = problem_of(cost.module, cost)
    bound = max(0, lower_bounds.bound_of(cost.module, cost, problem) - len(problem.jobs)) / TICKS
    bound_ms = Quantity(min(quantity(plan.attrs["makespan"]), bound), "ms")
    return replace(plan, attrs=plan.attrs.updated(bound=bound_ms))


def at_level_placed(module: Module, cascades: Sequence[Cascade], places: Mapping[str, tuple[int, ...]]) -> Module:
    """``places`` are the ranks of every trained stage. 0 ms stand as the bound (``with_bound``)."""
    trained = [stage.name for stage in module.stages if stage.trained]
    readers: dict[str, list[str]] = {name: [] for name in trained}
    for cascade in cascades:
        if cascade.stage in readers and has_gradient(cascade):
            readers[cascade.stage].append(cascade.name)
    makespan = max(cascade.end for cascade in cascades)
    return replace(
        module,
        level=Level.PLACED,
        cascades=tuple(cascades),
        reductions=tuple(Reduce(name, tuple(readers[name]), Attributes.of(ranks=places[name])) for name in trained),
        steps=tuple(Step(name) for name in trained),
        attrs=module.attrs.updated(makespan=Quantity(makespan, "ms"), bound=Quantity(0.0, "ms"), proved=False),
    )
