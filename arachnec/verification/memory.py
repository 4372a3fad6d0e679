"""Rule 4: every rank's memory stays under its device's limit, at every instruction of its list."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from arachnec.analysis.execution_model import ExecutionModel
from arachnec.analysis.memory import high_water
from arachnec.analysis.uses import Values, written
from arachnec.cluster.topology import machines, node_of
from arachnec.ir.diagnostic import Diagnostic
from arachnec.ir.nodes import Instruction, Program, Span

TOLERANCE_GIB = 1e-9


@dataclass(frozen=True)
class OutOfMemory(Diagnostic):
    title = "rank {rank} needs {need:.2f} GiB in `{instruction}`, its device has {limit:.2f} GiB"
    label = "{need:.2f} GiB here"
    help = (
        "{state:.2f} GiB are parameters and optimizer, {saved:.2f} saved for backward, {values:.2f} handed-off values "
        "and batches, {workspace:.2f} workspace, {communicators:.2f} communicators{gathered}; a higher degree, "
        "recomputation or an earlier `free` lowers it"
    )
    rank: int
    instruction: str
    need: float
    limit: float
    state: float
    saved: float
    values: float
    workspace: float
    communicators: float
    gathered: str


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
        parts = (peak.state, peak.saved, peak.values, peak.workspace, peak.communicators)
        gathered = f", {peak.gathered:.2f} gathered parameters" if peak.gathered else ""
        yield OutOfMemory(span, program.rank, where, peak.total, limit, *parts, gathered)


def _place(program: Program, index: int) -> tuple[str, Span | None]:
    if index < 0:
        return "its parameters alone", program.span
    instruction: Instruction = program.instructions[index]
    return written(instruction), instruction.span
