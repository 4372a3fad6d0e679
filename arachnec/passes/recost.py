"""``recost``: the times of a lowered program by other costs, its degrees, ranks and order as they are.

What would this plan take with what was measured since? The simulator then says when everything happens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from arachnec.analysis.gathers import layers_listed
from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Cascade, Instruction, Level, Module, Phase, Program, integer, quantity
from arachnec.ir.values import Quantity
from arachnec.lowering.order import forward_share
from arachnec.passes.annotate import Annotate
from arachnec.passes.infra.base import Pass
from arachnec.planning.formulate import problem_of
from arachnec.planning.lower_bounds import bound_of
from arachnec.planning.placement import in_order
from arachnec.solver.problem import TICKS


@dataclass(frozen=True)
class Recost(Pass):
    """New times for every instruction of a lowered module, by a profile or a device's specs.

    Every cascade starts as soon as its ranks and its inputs allow, in the order that the plan had.
    """

    needs: ClassVar[Level] = Level.LOWERED
    gives: ClassVar[Level] = Level.LOWERED

    profile: str | None = None

    def run(self, module: Module) -> Module:
        costed = Annotate(self.profile).run(replace(module, level=Level.PARTITIONED))
        costed = replace(costed, level=module.level)
        cost = CostModel(costed)
        cascades = retimed(costed.cascades, cost)
        programs = tuple(replace(p, instructions=tuple(_instructions(p, cascades, cost))) for p in module.programs)
        makespan = max((cascade.end for cascade in cascades.values()), default=0.0)
        problem = problem_of(costed, cost)
        # the problem rounds each time up by less than a tick
        ticks = max(0, bound_of(costed, cost, problem) - len(problem.jobs))
        bound = min(makespan, ticks / TICKS)
        return replace(
            costed,
            cascades=tuple(cascades[cascade.name] for cascade in module.cascades),
            programs=programs,
            attrs=module.attrs.updated(
                makespan=Quantity(makespan, "ms"),
                objective=None,
                bound=Quantity(bound, "ms"),
                area_bound=None,
                proved=False,
            ),
        )


def retimed(cascades: Sequence[Cascade], cost: CostModel) -> dict[str, Cascade]:
    """Every cascade on its ranks, as early as they and its inputs are there."""
    free: dict[int, float] = {}
    placed: dict[str, Cascade] = {}
    for cascade in in_order(cascades):
        inputs = (placed[name].end for name in cascade.inputs if name in placed)
        start = max(0.0, *inputs, *(free.get(rank, 0.0) for rank in cascade.ranks))
        end = start + cost.placed_time(cascade)
        placed[cascade.name] = cascade.with_attrs(start=Quantity(start, "ms"), end=Quantity(end, "ms"))
        free |= dict.fromkeys(cascade.ranks, end)
    return placed


def _instructions(program: Program, cascades: Mapping[str, Cascade], cost: CostModel) -> Iterator[Instruction]:
    stretched = 1.0  # how much longer the latest backward takes: reduces may start inside it
    for step in program.instructions:
        if step.op == "step":
            yield _with(step, time=cost.step_time(cost.stages[step.target]))
        elif step.op == "gather":
            layers = layers_listed(step, "layers")
            yield _with(step, time=cost.gather_time(cost.stages[step.target], step.peers, layers))
        elif step.op == "norm":
            yield _with(step, time=cost.norm_time(step.peers))
        elif step.op == "learn":
            yield _with(step, time=cost.all_reduce_time(step.peers, integer(step.attrs["bytes"])))
        elif step.op == "reduce":
            size = step.attrs.get("bytes")
            bucket_bytes = float(size) if isinstance(size, int) else None
            timed = _with(step, time=cost.reduce_time(cost.stages[step.target], step.peers, bucket_bytes))
            early = step.attrs.get("early")
            yield timed if early is None else _with(timed, early=quantity(early) * stretched)
        elif "time" in step.attrs:
            start, time = _part(step, cascades[step.target], cost)
            before = quantity(step.attrs["time"])
            stretched = time / before if before > 0 else 1.0
            yield _with(step, start=start, time=time)
        else:
            yield step


def _part(step: Instruction, cascade: Cascade, cost: CostModel) -> tuple[float, float]:
    """Start and time of one instruction of a cascade."""
    time = cascade.end - cascade.start
    if cascade.phase is not Phase.TRAIN:
        return cascade.start, time
    first = time * forward_share(cascade, cost.stages[cascade.stage])
    return (cascade.start, first) if step.op == "forward" else (cascade.start + first, time - first)


def _with(step: Instruction, **times: float) -> Instruction:
    attrs = step.attrs.updated(**{name: Quantity(value, "ms") for name, value in times.items()})
    return replace(step, attrs=attrs)
