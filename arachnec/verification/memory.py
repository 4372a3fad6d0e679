"""Rule 4: every rank's memory stays under its device's limit, and no claim is below its stages' formulas.

A program carries the memory of each instruction, so that the walk over its lists needs no model. Here every claim is
computed again from the stage's formulas, the cascade's shape, degree and recomputation, and compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from arachnec.analysis.communicators import ExecutionModel
from arachnec.analysis.memory import high_water
from arachnec.analysis.stage_handoffs import between_stages, handed_gib, parts_handed
from arachnec.analysis.uses import Values, gib, written
from arachnec.cluster.topology import machines, node_of
from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import Diagnostic, Mistake
from arachnec.ir.nodes import Cascade, Instruction, Module, Phase, Program, Span, quantity
from arachnec.ir.parameter_cells import gathered_gib
from arachnec.ir.stage_sizes import recomputed_blocks

TOLERANCE_GIB = 1e-9


def check_memory(values: Values, model: ExecutionModel) -> Iterator[Diagnostic]:
    module = values.module
    assert module.cluster is not None
    nodes = machines(module.cluster)
    for program in module.programs:
        limit = nodes[node_of(module.cluster, program.rank)].memory
        peak = high_water(values, program, model)
        if peak.total <= limit + TOLERANCE_GIB:
            continue
        where, span = _place(program, peak.index)
        gathered = f", {peak.gathered:.2f} gathered parameters" if peak.gathered else ""
        yield Mistake(
            span,
            f"rank {program.rank} needs {peak.total:.2f} GiB in `{where}`, its device has {limit:.2f} GiB",
            kind="out of memory",
            label=f"{peak.total:.2f} GiB here",
            help=(
                f"{peak.state:.2f} GiB are parameters and optimizer, {peak.saved:.2f} saved for backward, "
                f"{peak.values:.2f} handed-off values and batches, {peak.workspace:.2f} workspace, "
                f"{peak.communicators:.2f} communicators{gathered}; a higher degree, recomputation or an earlier "
                "`free` lowers it"
            ),
        )


def _place(program: Program, index: int) -> tuple[str, Span | None]:
    if index < 0:
        return "its parameters alone", program.span
    instruction: Instruction = program.instructions[index]
    return written(instruction), instruction.span


ROUNDING_GIB = 2e-6  # plans are written with six places
RELATIVE = 1e-6
OPS = ("encode", "forward", "backward", "denoise", "decode")
Handed: TypeAlias = tuple[str, int, int | None]
"""A value's way: the cascade that made it, the rank that reads it and, between stages, the one that it comes from."""


@dataclass(frozen=True)
class _Need:
    """GiB that an instruction leaves on its rank, and GiB while it runs, these included."""

    kept: float
    running: float


def check_memory_claims(values: Values, cost: CostModel, handed: Mapping[Handed, float]) -> Iterator[Diagnostic]:
    """``handed`` is what ``handed_sizes`` of the module is."""
    yield from _of_cascades(values, cost)
    needs: dict[tuple[str, str], _Need] = {}
    for program in values.module.programs:
        for step in program.instructions:
            if step.op == "receive":
                places = ((step.target, program.rank, source) for source in (step.peers[0], None))
                need = _Need(max(handed.get(place, 0.0) for place in places), 0.0)
                yield from _too_low(program.rank, step, values.cascades[step.target], need)
            if step.op not in OPS:
                continue
            key = step.op, step.target
            if key not in needs:
                needs[key] = _need(cost, step.op, values.cascades[step.target])
            yield from _too_low(program.rank, step, values.cascades[step.target], needs[key])


def only_claimed(module: Module) -> tuple[str, ...]:
    """The stages that cascades run and that have no formula of their memory: claims of them are believed."""
    run = {cascade.stage for cascade in module.cascades}
    known = {stage.name for stage in module.stages if {"saved", "workspace"} & set(stage.attrs)}
    return tuple(stage.name for stage in module.stages if stage.name in run - known)


def _of_cascades(values: Values, cost: CostModel) -> Iterator[Diagnostic]:
    """What reports and pages show of a cascade is what its formulas say, or more."""
    for cascade in values.module.cascades:
        if "memory" not in cascade.attrs:
            continue
        claimed = quantity(cascade.attrs["memory"])
        right = cost.memory(cascade, cascade.even_width, cost.recomputed(cascade), cascade.side)
        if claimed < right * (1 - RELATIVE) - ROUNDING_GIB:
            shape = f"{cascade.batch} x {cascade.tokens} tokens"
            yield Mistake(
                cascade.span,
                f"%{cascade.name} claims {claimed:.6g} GiB of memory, its stage says {right:.6g} GiB",
                kind="cascade memory too low",
                label=f"memory = {claimed:.6g} GiB",
                help=(
                    f"the formulas of @{cascade.stage} for {shape} on {cascade.width} ranks; write `memory = "
                    f"{right:.6g} GiB`"
                ),
            )


def handed_sizes(values: Values, cost: CostModel) -> dict[Handed, float]:
    """GiB of each value that a rank may receive."""
    sizes: dict[Handed, float] = {}
    for consumer in values.module.cascades:
        for producer in (values.cascades[name] for name in consumer.inputs if name in values.cascades):
            if not cost.handed(producer, consumer):  # what the stage itself has saved
                continue
            if between_stages(producer, consumer) and producer.side == consumer.side:
                for source, target, gib in parts_handed(producer, consumer, cost.stages, values.cascades):
                    sizes[producer.name, target, source] = gib
                continue
            size = handed_gib(producer, consumer, cost.stages, values.cascades)
            for rank in consumer.ranks:
                sizes[producer.name, rank, None] = max(size, sizes.get((producer.name, rank, None), 0.0))
    return sizes


def _need(cost: CostModel, op: str, cascade: Cascade) -> _Need:
    stage = cost.stages[cascade.stage]
    if op == "backward" and cascade.phase is Phase.TRAIN:
        return _Need(0.0, 0.0)  # runs in what its forward keeps
    blocks = recomputed_blocks(cascade.attrs.get("recompute"), stage)
    most = cost.memory(cascade, cascade.even_width, blocks, cascade.side) - gathered_gib(stage)
    if cascade.phase is Phase.ENCODE:
        return _Need(cost.output(cascade), most)
    received = cost.received(cascade, cascade.side)
    most -= received
    if cascade.phase in (Phase.DENOISE, Phase.DECODE):
        return _Need(cost.output(cascade), most)
    if op == "backward":
        return _Need(0.0, most)
    if cascade.phase is Phase.TRAIN:
        return _Need(most, most)
    kept = cost.kept(cascade, cascade.width, blocks, cascade.side)
    return _Need(kept - received - gathered_gib(stage), most)


def _too_low(rank: int, step: Instruction, cascade: Cascade, need: _Need) -> Iterator[Diagnostic]:
    kept = gib(step, "memory")
    running = kept + gib(step, "workspace")
    for claimed, right, what in ((kept, need.kept, "memory"), (running, need.running, "memory and workspace")):
        if claimed >= right * (1 - RELATIVE) - ROUNDING_GIB:
            continue
        shape = f"{cascade.batch} x {cascade.tokens} tokens"
        wanted = (
            f"{'memory' if what == 'memory' else 'workspace'} = {right if what == 'memory' else right - kept:.6g} GiB"
        )
        yield Mistake(
            step.span,
            f"rank {rank} claims {claimed:.6g} GiB of {what} for `{written(step)}`, its stage says {right:.6g} GiB",
            kind="memory too low",
            label=f"{claimed:.6g} GiB of {what}",
            help=f"the formulas of @{cascade.stage} for {shape} on {cascade.width} ranks; write at least `{wanted}`",
        )
        return
