"""The module of a placed pipeline: its cascades with the makespan, the bound, and what ends the iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Cascade, Level, Module, Reduce, Step
from arachnec.ir.values import Attributes, Quantity
from arachnec.planning import mixed_bound
from arachnec.planning.formulate import has_gradient, problem_of
from arachnec.solver.problem import TICKS


def bound_of(module: Module, cost: CostModel) -> float:
    """ms before which no schedule of any kind ends."""
    problem = problem_of(module, cost)
    return max(0, mixed_bound.bound_of(module, cost, problem) - len(problem.jobs)) / TICKS


def at_level_placed(
    module: Module, cascades: Sequence[Cascade], places: Mapping[str, tuple[int, ...]], bound: float
) -> Module:
    """``places`` are the ranks of every trained stage, ``bound`` is in ms."""
    trained = [stage.name for stage in module.stages if stage.trained]
    readers: dict[str, list[str]] = {name: [] for name in trained}
    for cascade in cascades:
        if cascade.stage in readers and has_gradient(cascade):
            readers[cascade.stage].append(cascade.name)
    makespan = max(cascade.end for cascade in cascades)
    bound_ms = Quantity(min(makespan, bound), "ms")
    return replace(
        module,
        level=Level.PLACED,
        cascades=tuple(cascades),
        reductions=tuple(Reduce(name, tuple(readers[name]), Attributes.of(ranks=places[name])) for name in trained),
        steps=tuple(Step(name) for name in trained),
        attrs=module.attrs.updated(makespan=Quantity(makespan, "ms"), bound=bound_ms, proved=False),
    )
