"""Rule 4, of what lies on a rank throughout: as much as its stages say, whatever the program claims."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from arachnec.analysis.memory import state_of
from arachnec.analysis.stage_ranks import resident_gib, resident_ranks
from arachnec.analysis.uses import Values
from arachnec.ir.diagnostic import Diagnostic

TOLERANCE = 1e-6  # of a sum that was printed


@dataclass(frozen=True)
class StateTooLow(Diagnostic):
    title = "program rank {rank} claims {claimed:.3f} GiB of state, its stages hold {right:.3f} GiB"
    label = "state = {claimed:.3f} GiB"
    help = "`state` is the sum over the stages on the rank, {stages}: write `state = {right:.6g} GiB`"
    rank: int
    claimed: float
    right: float
    stages: str


def check_residency(values: Values) -> Iterator[Diagnostic]:
    module = values.module
    assert module.cluster is not None
    resident = [(stage, resident_ranks(module, module.cluster, stage)) for stage in module.stages]
    for program in module.programs:
        here = [stage for stage, ranks in resident if program.rank in ranks]
        right, claimed = resident_gib(here, "state"), state_of(program)
        if claimed < right * (1 - TOLERANCE):
            names = ", ".join(f"@{stage.name}" for stage in here)
            yield StateTooLow(program.span, program.rank, claimed, right, names)
