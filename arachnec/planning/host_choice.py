"""Stages with a part of them in host memory, and the GiB of it that a plan takes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from arachnec.cost.model import CostModel
from arachnec.ir.host_placement import INPUTS, PARAMETERS, PLACED, in_host
from arachnec.ir.nodes import Cascade, Module, Phase, Stage, formula, integer, quantity
from arachnec.ir.parameter_cells import cell_of
from arachnec.ir.recomputation import block_count
from arachnec.ir.stage_sizes import count_in, element_bytes, formula_in, gib, gradient_element_bytes, trained_count
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
    if PARAMETERS in listed and cell_of(stage) is None:
        stage = _whole_or_in_a_cell(stage)
    optimizer, others = _sizes(stage)
    kept = optimizer + (others if PARAMETERS in listed else 0.0)
    attrs = stage.attrs.updated(
        host=listed,
        state=Quantity(max(0.0, quantity(stage.attrs["state"]) - kept), "GiB"),
        host_state=Quantity(kept, "GiB"),
        host_inputs=_inputs(stage) if INPUTS in listed else None,
    )
    return replace(stage, attrs=attrs)


def _whole_or_in_a_cell(stage: Stage) -> Stage:
    """Layers that come and go have a cell: of one rank, or, where the optimizer is dealt out, of as many as that: all,
    or those of its stage."""
    if "sharded" not in stage.attrs:
        return replace(stage, attrs=stage.attrs.updated(cell=1))
    shares = integer(stage.attrs["sharded"])
    whole = quantity(stage.attrs["state"]) + gib(stage.attrs.get("optimizer")) * (1 - 1 / shares)
    attrs = stage.attrs.updated(sharded=None, cell=shares, state=Quantity(whole / shares, "GiB"))
    return replace(stage, attrs=attrs)


def _sizes(stage: Stage) -> tuple[float, float]:
    """GiB on one rank of the optimizer, and of parameters and gradients."""
    cell = cell_of(stage) or 1
    shares = cell * integer(stage.attrs.get("sharded", 1))
    others = count_in(stage, "params") * element_bytes(stage) + trained_count(stage) * gradient_element_bytes(stage)
    return gib(stage.attrs.get("optimizer")) / shares, others / cell / GIB


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
