"""``schedule-pipeline``: stages on ranks, and every rank's order (``arachnec.planning.pipeline_plan``)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from arachnec.cost.model import CostModel
from arachnec.ir.diagnostic import user_error
from arachnec.ir.nodes import Level, Module
from arachnec.passes.infra.base import Count, Pass
from arachnec.pipelining.csv_format import read_csv
from arachnec.pipelining.schedules import WarmUp
from arachnec.planning.pipeline_orders import SPLITTING, ScheduleName, stages_each
from arachnec.planning.pipeline_places import with_bound
from arachnec.planning.pipeline_plan import Options, pipelined

OWN: dict[str, ScheduleName] = {"k": "kfkb", "v": "interleaved-1f1b", "policy": "dapple"}  # options of one schedule


@dataclass(frozen=True)
class SchedulePipeline(Pass):
    """Runs the stages that ``stages`` made by a fixed ``schedule``, as often side by side as there are ranks for.

    ``schedule`` is ``1f1b`` by default. ``k`` is that of ``kfkb``, by default the one with the shortest step of those
    that fit; ``v`` the stages a rank of ``interleaved-1f1b``, by default 2; ``policy`` the warm-up of ``dapple``, by
    default A. ``degree`` is the sequence-parallel degree of every
    stage, or ``degrees`` that of each, which then has as many ranks; ``recompute`` whether blocks are run again in the
    backward. By default the least degree at which the micro-batches fit, recomputing where that is faster. ``orders``
    is a CSV of torch's pipelining that says what every rank of a pipeline does, instead of a schedule and its options.
    """

    needs: ClassVar[Level] = Level.COSTED
    gives: ClassVar[Level] = Level.PLACED

    schedule: ScheduleName | None = None
    k: Count | None = None
    v: Count | None = None
    policy: WarmUp | None = None
    degree: Count | None = None
    recompute: bool | None = None
    orders: str | None = None
    degrees: tuple[Count, ...] | None = None

    def __post_init__(self) -> None:
        if self.orders is not None:
            beside = [option for option in ("schedule", *OWN) if getattr(self, option) is not None]
            if beside:
                raise user_error(
                    f"`{beside[0]}` stands beside `orders`, whose file says what every rank does",
                    label="in these options",
                    help=f"leave `{beside[0]}` out, or `orders`",
                )
        for option, schedule in OWN.items():
            if getattr(self, option) is not None and self.name_of_schedule != schedule:
                raise user_error(
                    f"`{option}` is an option of `{schedule}`, and the schedule is `{self.name_of_schedule}`",
                    label="in these options",
                    help=f"leave `{option}` out, or give `schedule={schedule}`",
                )
        if self.degree is not None and self.degrees is not None:
            raise ValueError("degree is that of every stage, and degrees are those of each: give one of them")

    @property
    def name_of_schedule(self) -> ScheduleName:
        return self.schedule or "1f1b"

    @property
    def stages_each(self) -> int:
        """Stages on every rank, where no file says it."""
        return stages_each(self.name_of_schedule, self._stages_in_turn)

    @property
    def _stages_in_turn(self) -> int:
        return 2 if self.v is None else self.v

    @property
    def splits_backward(self) -> bool:
        """Whether weight gradients must be cascades of their own."""
        if self.orders is not None:
            return read_csv(Path(self.orders)).splits_backward
        return self.name_of_schedule in SPLITTING

    @property
    def place_options(self) -> dict[str, Any]:
        """What says how many ranks hold a stage: passes before this one have these as options."""
        if self.orders is None or self.degrees is not None:  # these say it, also beside a file
            return {"stages_each": self.stages_each, "degrees": self.degrees, "pipeline": None}
        file = read_csv(Path(self.orders))
        fullest = max(Counter(file.placement).values())
        return {"stages_each": fullest, "degrees": None, "pipeline": len(file.orders)}

    def run(self, module: Module) -> Module:
        own = (self.name_of_schedule, self.k, self._stages_in_turn, self.degree, self.recompute, self.policy or "A")
        cost = CostModel(module)
        return with_bound(pipelined(module, Options(*own, self.orders, self.degrees), cost), cost)
