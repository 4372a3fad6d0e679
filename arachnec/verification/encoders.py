"""Rule 2, inside an `encode` cascade: its ranks can share its clips.

More ranks than clips make one clip after the other together. Each needs a part of its own, as far as the stage says
that it was divided; what no rank was tried at may be refused by an operator in the middle of a run. Ranks that each
hold a part of the weights meet in every block: all of their cell, and no others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from arachnec.analysis.uses import Values, written
from arachnec.ir.diagnostic import Diagnostic, counted
from arachnec.ir.parameter_cells import own_cell
from arachnec.ir.stage_sizes import count_in
from arachnec.ir.tensor_parallel import divided_encoders


@dataclass(frozen=True)
class SharedTooFar(Diagnostic):
    title = "rank {rank} runs `{instruction}`, and {most} at most share a clip of @{stage}"
    label = "{clips} on {ranks}"
    help = "place it on fewer ranks: the stage says `divides = {divides}`"
    rank: int
    instruction: str
    most: str
    stage: str
    clips: str
    ranks: str
    divides: int


@dataclass(frozen=True)
class OtherCell(Diagnostic):
    title = "rank {rank} runs `{instruction}`, and the weights of @{stage} lie on {most} together"
    label = "on {ranks}"
    help = "place it on one cell: the stage says `tensor_parallel = {cell}`"
    rank: int
    instruction: str
    stage: str
    most: str
    ranks: str
    cell: int


def check_encoders(values: Values) -> Iterator[Diagnostic]:
    divides = {stage.name: count_in(stage, "divides") for stage in values.module.stages}
    cells = divided_encoders(values.module)
    for program in values.module.programs:
        for step in program.instructions:
            if step.op != "encode":
                continue
            cascade, ranks = values.cascades[step.target], max(1, len(step.peers))
            most, cell = divides[cascade.stage], cells.get(cascade.stage)
            if cell is not None:
                if step.peers != own_cell(program.rank, cell):
                    where = step.span, program.rank, written(step), cascade.stage
                    yield OtherCell(*where, counted(cell, "rank"), counted(ranks, "rank"), cell)
            elif most and ranks > max(most, cascade.batch):
                amounts = counted(cascade.batch, "clip"), counted(ranks, "rank"), most
                where = step.span, program.rank, written(step), counted(most, "rank")
                yield SharedTooFar(*where, cascade.stage, *amounts)
