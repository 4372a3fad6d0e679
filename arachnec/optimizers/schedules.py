"""Learning rates by step, from a scheduler of torch behind a linear warm-up.

In the k-th of ``warmup`` steps, from 0, rates are (k + 1) / warmup of what the scheduler begins with; the scheduler
counts from the step behind them. Rates follow from the number of steps alone, so a resumed run has them again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from arachnec.executable.training_options import Schedule, bad_value
from arachnec.ir.diagnostic import UserError
from arachnec.optimizers.classes import constructed, scheduler_class

LOOKED = 100  # steps whose rates are looked at beforehand
MOVED = ("lr", "momentum", "betas")  # what schedulers of torch change


class _Held(Optimizer):
    """Groups that a scheduler may change, and nothing to update."""

    def __init__(self, groups: Sequence[Mapping[str, Any]]) -> None:
        own = [{"params": [nn.Parameter(torch.empty(0))], **group} for group in groups]
        super().__init__(own, dict(groups[0]) if groups else {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Schedulers ask for it before each of theirs."""


class Rates:
    """``groups`` are the arguments of the optimizer's groups, with their own ``lr``."""

    def __init__(self, schedule: Schedule, groups: Sequence[Mapping[str, Any]]) -> None:
        self._schedule, self._groups = schedule, groups
        if self._has_own and schedule != Schedule():
            reason = "the optimizer has no `lr` and finds its rate itself"
            raise unwanted_schedule_error(schedule, reason, "leave [schedule] out, or give it an `lr`")
        self._begin()

    def at(self, step: int) -> list[dict[str, Any]]:
        """What the scheduler says of every group in optimizer step ``step``, from 0; ``lr`` at least.

        Raises ``UserError`` where the scheduler has ended before, and for a rate below 0 or none at all.
        """
        warmup = self._schedule.warmup
        rises = (step + 1) / warmup if step < warmup else 1.0
        self._advance(max(0, step - warmup))
        moved = MOVED if self._scheduler is not None else ("lr",)
        rates = [{key: group[key] for key in moved if key in group} for group in self._held.param_groups]
        if self._has_own:
            return [{key: value for key, value in rate.items() if value is not None} for rate in rates]
        for rate in rates:
            self._demand_rate(step, rate["lr"])
        return [{**rate, "lr": rate["lr"] * rises} for rate in rates]

    @property
    def _has_own(self) -> bool:
        """Whether the optimizer finds a rate itself, as Adafactor does without one."""
        return any(group.get("lr") is None for group in self._groups)

    def _demand_rate(self, step: int, rate: float) -> None:
        chosen = self._schedule.scheduler
        if chosen is not None and not is_rate(rate):
            reason = f"{chosen.name} gives step {step} the learning rate {rate:g}"
            raise UserError(bad_value("schedule", chosen.arguments, reason, "give rates of at least 0"))

    def _begin(self) -> None:
        self._held = _Held(self._groups)
        chosen = self._schedule.scheduler
        self._count = 0
        self._scheduler: LRScheduler | None = None
        if chosen is not None:
            self._scheduler = constructed(scheduler_class(chosen.name), self._held, "schedule", chosen.arguments)

    def _advance(self, count: int) -> None:
        given = self._schedule.scheduler
        if self._scheduler is None or given is None:
            return
        if count < self._count:
            self._begin()
        while self._count < count:
            self._held.step()
            try:
                self._scheduler.step()
            except ValueError as error:
                reason = f"it ends before step {self._count + 1 + self._schedule.warmup}: {error}"
                remedy = "give it as many steps as the run takes, without those of `warmup`; --resume goes on"
                raise UserError(bad_value("schedule.name", given.name, reason, remedy)) from None
            except (ArithmeticError, TypeError) as error:
                reason = f"{given.name} cannot take a step with these arguments: {error}"
                raise UserError(bad_value("schedule", given.arguments, reason, "correct its arguments")) from None
            self._count += 1


def unwanted_schedule_error(schedule: Schedule, reason: str, remedy: str) -> UserError:
    chosen = schedule.scheduler
    key, value = ("warmup", schedule.warmup) if chosen is None else ("name", chosen.name)
    return UserError(bad_value(f"schedule.{key}", value, reason, remedy))


def is_rate(rate: float) -> bool:
    """Whether it is one to train with; a schedule that ends at 0 may miss it by rounding."""
    return math.isfinite(rate) and rate > -1e-12


def demand_schedule(schedule: Schedule, groups: Sequence[Mapping[str, Any]], steps: int = 0) -> None:
    """Raises ``UserError`` for a schedule that cannot be made, or that does not last for so many steps."""
    rates = Rates(schedule, groups)
    chosen = schedule.scheduler
    if chosen is None:
        return
    ends = bool({"total_steps", "epochs"} & set(chosen.arguments))
    for step in range(min(steps, LOOKED) if ends else schedule.warmup + LOOKED):
        rates.at(step)
    if ends and steps:
        rates.at(steps - 1)
