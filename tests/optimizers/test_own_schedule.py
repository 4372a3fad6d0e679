"""A schedule of the user's script: stepped as torch steps it, and a mistake in it is one message."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from arachnec.ir.diagnostic import UserError
from arachnec.models.given_module import guarded
from arachnec.optimizers.own_scripts import advance, demand_rates, own_schedule


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.AdamW([nn.Parameter(torch.zeros(2))], lr=1.0)


def test_a_resumed_run_steps_it_to_its_place() -> None:
    held = optimizer()
    advance(own_schedule(lambda o: lr_scheduler.StepLR(o, 2, 0.1), held), 5)
    assert held.param_groups[0]["lr"] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda o: None, "returned a NoneType, which has no `step"),
        (lambda o: lr_scheduler.ReduceLROnPlateau(o), "follows losses"),
        (lr_scheduler.CosineAnnealingLR, "raised TypeError: .*T_max"),
        (3, "is of type int, not a function"),
    ],
)
def test_what_is_no_schedule_is_refused(function: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason) as caught:
        own_schedule(function, optimizer())
    assert caught.value.diagnostics[0].text(caught.value.diagnostics[0].help)


def test_one_of_another_optimizer_is_refused() -> None:
    with pytest.raises(UserError, match="a StepLR of another optimizer"):
        own_schedule(lambda o: lr_scheduler.StepLR(optimizer(), 2), optimizer())


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf")])
def test_no_step_is_taken_at_a_rate_that_is_none(rate: float) -> None:
    held = optimizer()
    schedule = own_schedule(lambda o: lr_scheduler.LambdaLR(o, lambda step: rate if step == 2 else 0.0), held)
    for step in range(2):
        demand_rates(held, step)
        advance(schedule, 1)
    with pytest.raises(UserError, match="gives step 2 the learning rate"):
        demand_rates(held, 2)


def test_a_mistake_in_the_function_is_told_at_its_line() -> None:
    with pytest.raises(UserError, match=r"raised ValueError: .* in scheduler\(\)") as caught:
        own_schedule(lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0), optimizer())
    span = caught.value.diagnostics[0].span
    assert span is not None
    assert Path(span.file) == Path(__file__)
    assert "max_lr" in Path(__file__).read_text().splitlines()[span.line - 1]


def test_one_that_ends_before_the_run_says_so() -> None:
    schedule = own_schedule(lambda o: lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=3), optimizer())
    advance(schedule, 3)
    with pytest.raises(UserError, match="raised ValueError: Tried to step"):
        advance(schedule, 1)


def test_a_class_has_no_line_and_stays_as_it_is() -> None:
    assert guarded(torch.optim.AdamW, "optimizer") is torch.optim.AdamW
