"""Stages with a part of them in host memory, and the GiB of it that a plan takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from arachnec.cost.model import CostModel
from arachnec.ir.host_placement import INPUTS, PARAMETERS, PLACED, in_host
from arachnec.ir.nodes import Cascade, Module, Phase, Stage, formula, integer
from arachnec.ir.stage_sizes import block_count, count_in, element_bytes, formula_in, gib
from arachnec.ir.state_placement import place
from arachnec.ir.values import Formula, Quantity, Term

GIB = 2**30


def with_host(module: Module, what: str) -> Module:
    """The module with its trained stages' optimizer, ``parameters`` as well, or ``inputs`` of blocks too, in hosts."""
    listed = PLACED[: PLACED.index(what) + 1]
    placed = (_placed(stage, listed) if stage.trained else stage for stage in module.stages)
    return replace(module, stages=tuple(placed))


def _placed(stage: Stage, listed: tuple[str, ...]) -> Stage:
    if in_host(stage) or "state" not in stage.attrs:
        return stage
    cell, sharded = stage.attrs.get("cell"), stage.attrs.get("sharded")
    if PARAMETERS in listed and cell is None:  # layers that come and go have a cell: as wide as the optimizer, or one
        cell, sharded = sharded or 1, None
    inputs = _inputs(stage) if INPUTS in listed else None
    nothing = Quantity(0.0, "GiB")
    return place(stage, cell=cell, sharded=sharded, host=listed, host_state=nothing, host_inputs=inputs)


def _inputs(stage: Stage) -> Formula:
    """GiB of the inputs of all blocks; without figures of the blocks, a token's width for each."""
    listed, classes = stage.attrs.get("block_inputs"), stage.attrs.get("classes")
    if isinstance(listed, tuple) and isinstance(classes, tuple):
        formulas = [formula(listed[integer(number)]) for number in classes]
        return Formula(_added(formulas), "GiB")
    if formula_in(stage, "saved_recompute") is None:
        return Formula((), "GiB")
    size = count_in(stage, "hidden") * element_bytes(stage) * block_count(stage) / GIB
    symbols = ("S", "T") if stage.attrs.get("joint") else ("S",)
    return Formula(tuple(Term(size, (("B", 1), (symbol, 1))) for symbol in symbols), "GiB")


def _added(formulas: Iterable[Formula]) -> tuple[Term, ...]:
    sums: dict[tuple[tuple[str, int], ...], float] = {}
    for formula_of_block in formulas:
        for term in formula_of_block.terms:
            sums[term.powers] = sums.get(term.powers, 0.0) + term.coefficient
    return tuple(Term(value, powers) for powers, value in sums.items())


def host_gib(module: Module, cost: CostModel | None = None) -> float:
    """GiB of a node's host that a module takes: its devices' state, and where it is costed the inputs of the largest
    cascade. Of a pipeline every device is taken to have the largest stage."""
    assert module.cluster is not None
    parts = [gib(stage.attrs.get("host_state")) for stage in module.stages if "part_of" in stage.attrs]
    state = sum(gib(stage.attrs.get("host_state")) for stage in module.stages if "part_of" not in stage.attrs)
    inputs = 0.0 if cost is None else max((_of_cascade(c, cost) for c in module.cascades), default=0.0)
    return module.cluster.gpus * (state + max(parts, default=0.0) + inputs)


def _of_cascade(cascade: Cascade, cost: CostModel) -> float:
    if cascade.phase is not Phase.TRAIN:
        return 0.0
    rows = cost.table.options(cascade)
    sizes = (cost.host_inputs(cascade, degree, row.recompute, row.strategy.sides) for degree, row in rows.items())
    return max(sizes, default=0.0)
