"""What can be wrong with a pipeline that is asked for: its degrees, its cells, its memory."""

from __future__ import annotations

from dataclasses import dataclass

from arachnec.ir.diagnostic import Diagnostic, UserError, user_error


def cell_does_not_divide_error(cell: int, ranks: int, degree: int) -> UserError:
    return user_error(
        f"cells of {cell} ranks do not divide the {ranks} ranks of each stage, {degree} a micro-batch",
        help=f"give `shard-parameters` a cell that divides {ranks}, and a degree that it divides",
    )


@dataclass(frozen=True)
class PipelineDoesNotFit(Diagnostic):
    title = "schedule `{schedule}` needs {needed:.4g} GiB on the ranks of @{stage}, their devices have {memory:.4g}"
    help = (
        "use more stages or ranks, a schedule that holds fewer micro-batches, or `partition{{tokens=...}}` with fewer "
        "tokens in each{more}"
    )
    schedule: str
    needed: float
    stage: str
    memory: float
    more: str = ""
