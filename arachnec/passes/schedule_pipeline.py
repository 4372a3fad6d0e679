"""``schedule-pipeline``: stages on ranks, and every rank's order (``arachnec.planning.pipeline_plan``)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Level, Module
from arachnec.passes.infra.base import Pass
from arachnec.pipelining.csv_format import read_csv
from arachnec.pipelining.one_f_one_b import WarmUp
from arachnec.planning.pipeline_errors import OptionOfAnotherSchedule
from arachnec.planning.pipeline_orders import SPLITTING, ScheduleName, stages_each
from arachnec.planning.pipeline_plan import Options, pipelined

OWN: dict[str, ScheduleName] = {"k": "kfkb", "v": "interleaved-1f1b", "policy": "dapple"}  # options of one schedule


@dataclass(frozen=True)
class SchedulePipeline(Pass):
    """Runs the stages that ``stages`` made by a fixed ``schedule``, as often side by side as there are ranks for.

    ``k`` is that of ``kfkb``, by default the one with the shortest step of those that fit; ``v`` the stages a rank of
    ``interleaved-1f1b``; ``policy`` the warm-up of ``dapple``. ``degree`` is the sequence-parallel degree of every
    stage, or ``degrees`` that of each, which then has as many ranks; ``recompute`` whether blocks are run again in the
    backward. By default the least degree at which the micro-batches fit, recomputing where that is faster. ``orders``
    is a CSV of torch's pipelining that says what every rank of a pipeline does, instead of a schedule.
    """

    needs: ClassVar[Level] = Level.COSTED
    gives: ClassVar[Level] = Level.PLACED

    schedule: ScheduleName = "1f1b"
    k: int | None = None
    v: int = 2
    policy: WarmUp = "A"
    degree: int | None = None
    recompute: bool | None = None
    orders: str | None = None
    degrees: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for option, schedule in OWN.items():
            if getattr(self, option) != getattr(type(self), option) and self.schedule != schedule:
                raise UserError(OptionOfAnotherSchedule(None, option, schedule, self.schedule))
        if self.k is not None and self.orders is not None:
            raise ValueError("k is of `kfkb`, and the orders are those of a file")
        if self.v < 1:
            raise ValueError("v is a number of stages on a rank, 1 at least")
        if self.k is not None and self.k < 1:
            raise ValueError("k is a number of micro-batches, 1 at least")

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients must be cascades of their own."""
        if self.orders is not None:
            return read_csv(Path(self.orders)).splits_backward
        return self.schedule in SPLITTING

    @property
    def place_options(self) -> dict[str, Any]:
        """What says how many ranks hold a stage: passes before this one have these as options."""
        if self.orders is None or self.degrees is not None:  # these say it, also beside a file
            return {"stages_each": stages_each(self.schedule, self.v), "degrees": self.degrees, "pipeline": None}
        file = read_csv(Path(self.orders))
        fullest = max(Counter(file.placement).values())
        return {"stages_each": fullest, "degrees": None, "pipeline": len(file.orders)}

    def run(self, module: Module) -> Module:
        how = (self.schedule, self.k, self.v, self.degree, self.recompute, self.policy, self.orders, self.degrees)
        return pipelined(module, Options(*how))
