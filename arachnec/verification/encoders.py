"""Rule 2, inside an `encode` cascade: its ranks can share its clips.

More ranks than clips make one clip after the other together. Each needs a part of its own, as far as the stage says
that it was divided; what no rank was tried at may be refused by an operator in the middle of a run. Ranks that each
hold a part of the weights meet in every block: all of their cell, and no others.
"""

from __future__ import annotations

from collections.abc import Iterator

from arachnec.analysis.uses import Values, written
from arachnec.ir.diagnostic import Diagnostic, Mistake, counted
from arachnec.ir.parameter_cells import own_cell
from arachnec.ir.stage_sizes import count_in
from arachnec.ir.tensor_parallel import divided_encoders


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
                    yield Mistake(
                        step.span,
                        f"rank {program.rank} runs `{written(step)}`, and the weights of @{cascade.stage} lie "
                        f"on {counted(cell, 'rank')} together",
                        kind="other cell",
                        label=f"on {counted(ranks, 'rank')}",
                        help=f"place it on one cell: the stage says `tensor_parallel = {cell}`",
                    )
            elif most and ranks > max(most, cascade.batch):
                yield Mistake(
                    step.span,
                    f"rank {program.rank} runs `{written(step)}`, and {counted(most, 'rank')} at most share a clip of "
                    f"@{cascade.stage}",
                    kind="shared too far",
                    label=f"{counted(cascade.batch, 'clip')} on {counted(ranks, 'rank')}",
                    help=f"place it on fewer ranks: the stage says `divides = {most}`",
                )
