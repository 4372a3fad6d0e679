"""Optimizers and rate schedules of the user's own: called and stepped, their mistakes told as the user's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from arachnec.ir.diagnostic import UserError, user_error
from arachnec.ir.users_code import users_frames
from arachnec.models.file import line_span, ran_out_of_memory
from arachnec.models.given_module import guarded
from arachnec.optimizers.recipe import Recipe
from arachnec.optimizers.schedules import is_rate


def wrong_schedule_error(reason: str, remedy: str) -> UserError:
    return user_error(f"`scheduler` {reason}", help=remedy)


def own_schedule(function: Callable[[Optimizer], Any], optimizer: Optimizer) -> Any:
    """What ``function`` makes of the optimizer.

    Raises ``UserError`` where it raises, or where what it gives cannot be stepped by the number of steps alone.
    """
    if not callable(function):
        remedy = "give one: scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 100)"
        reason = f"is of type {type(function).__name__}, not a function of the optimizer"
        raise wrong_schedule_error(reason, remedy)
    try:
        schedule = guarded(function, "scheduler")(optimizer)
    except UserError:
        raise
    except Exception as error:
        raise _refusal(error, "look at its arguments: it is called with the engine's optimizer") from error
    if not callable(getattr(schedule, "step", None)):
        reason = f"returned a {type(schedule).__name__}, which has no `step()`"
        raise wrong_schedule_error(reason, "return a schedule of torch.optim.lr_scheduler")
    if isinstance(schedule, ReduceLROnPlateau):
        reason = "returned a ReduceLROnPlateau: it follows losses that a resumed run cannot see again"
        raise wrong_schedule_error(reason, "return a schedule that follows from the number of steps")
    held = getattr(schedule, "optimizer", None)
    if isinstance(held, Optimizer) and held is not optimizer:
        reason = f"returned a {type(schedule).__name__} of another optimizer, whose rates nothing reads"
        raise wrong_schedule_error(reason, "make it over the optimizer that it is given")
    return schedule


def demand_rates(optimizer: Optimizer, step: int) -> None:
    """Raises ``UserError`` where a schedule has set a rate at which ``step`` cannot be taken."""
    for group in optimizer.param_groups:
        rate = float(group["lr"])
        if not is_rate(rate):
            remedy = "rates are numbers of at least 0; what was trained before is in the checkpoint, if any"
            raise wrong_schedule_error(f"gives step {step} the learning rate {rate:g}", remedy)


def advance(schedule: Any, steps: int) -> None:
    """Bring a new schedule to where a run goes on. Raises as ``step_schedule`` does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Detected call of `lr_scheduler.step")
        for _ in range(steps):
            step_schedule(schedule)


def step_schedule(schedule: Any) -> None:
    """One step of a schedule. Raises ``UserError`` where it has ended before, or raises."""
    try:
        schedule.step()
    except Exception as error:
        remedy = "a schedule needs as many steps as the whole job; what was trained before is in the checkpoint, if any"
        raise _refusal(error, remedy) from error


def _refusal(error: Exception, remedy: str) -> UserError:
    return wrong_schedule_error(f"raised {type(error).__name__}: {' '.join(str(error).split())}", remedy)


@contextmanager
def told_update(recipe: Recipe, kind: str, step: int) -> Iterator[None]:
    """Raises ``UserError`` for what the user's code raised in the update of optimizer step ``step``, from 0.

    That is code of an optimizer that torch does not have, or a hook on one that it has. What torch itself raised, and
    memory that ran out, pass.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        frames = users_frames(error)
        if ran_out_of_memory(error) or (recipe.kind is not None and not frames):
            raise
        message = " ".join(str(error).split())
        told = f"{type(error).__name__}{': ' if message else ''}{message}"
        # without frames, a class of an installed package
        span = line_span(Path(frames[-1].filename), frames[-1].lineno or 1) if frames else recipe.span
        raise user_error(
            f"`optimizer`, a {kind}, raised {told} in its update of step {step}",
            label="raised here" if frames else "the optimizer comes from here",
            help=(
                "correct it, and resume from the last whole checkpoint: this step may have updated some "
                "parameters and is kept nowhere"
            ),
            span=span,
        ) from error
