"""What an optimizer of the user's own raises in an update is one message at its line; a bug of torch or ours is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from arachnec.executable.training_options import Training
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Span
from arachnec.model_state.optimizer import Optimizer
from arachnec.optimizers.own_scripts import told_update
from arachnec.optimizers.recipe import Recipe, recipe_of


class Failing(torch.optim.Optimizer):
    """Plain descent that fails in its third update."""

    def __init__(self, parameters: Any, failure: Callable[[], BaseException]) -> None:
        super().__init__(parameters, {"lr": 0.5})
        self.failure = failure

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for value in self.param_groups[0]["params"]:
            kept = self.state[value]
            kept["count"] = kept.get("count", torch.zeros(())) + 1
            if not kept["count"].is_meta and int(kept["count"]) == 3:
                raise self.failure()  # at this line
            value.sub_(0.5 * value.grad)


def updated(failure: Callable[[], BaseException]) -> Optimizer:
    """After two updates, those of steps 4 and 5, with the third one due."""
    parameters = {"w": nn.Parameter(torch.ones(2))}
    training = Training(clip_norm=0.0)
    recipe = recipe_of(parameters, training, lambda values: Failing(values, failure))
    optimizer = Optimizer(parameters, training, recipe=recipe)
    optimizer.done = 4
    for _ in range(2):
        parameters["w"].grad = torch.ones(2)
        optimizer.step()
    assert parameters["w"].tolist() == [0.0, 0.0]
    parameters["w"].grad = torch.ones(2)
    return optimizer


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (lambda: ValueError("negative\nstep size"), "raised ValueError: negative step size in its update of step 6"),
        (lambda: SystemExit(), "raised SystemExit in its update of step 6"),
    ],
)
def test_an_own_class_that_raises_is_told_with_its_line_and_step(
    failure: Callable[[], BaseException], told: str
) -> None:
    optimizer = updated(failure)
    with pytest.raises(UserError, match=rf"^[^\n]*`optimizer`, a Failing, {told}") as caught:
        optimizer.step()
    span = caught.value.diagnostics[0].span
    assert span is not None
    assert Path(span.file) == Path(__file__)
    assert Path(__file__).read_text().splitlines()[span.line - 1].endswith("# at this line")
    assert optimizer.done == 6


def test_memory_that_ran_out_is_no_mistake_of_the_optimizer() -> None:
    optimizer = updated(lambda: torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(torch.OutOfMemoryError):
        optimizer.step()


def test_a_hook_on_an_optimizer_of_torch_is_the_users_code() -> None:
    parameters = {"w": nn.Parameter(torch.ones(2))}
    optimizer = Optimizer(parameters, Training(clip_norm=0.0))

    def hook(*_: object) -> None:
        raise KeyError("no such rate")

    optimizer.torch.register_step_pre_hook(hook)
    parameters["w"].grad = torch.ones(2)
    with pytest.raises(
        UserError, match="`optimizer`, a AdamW, raised KeyError: 'no such rate' in its update of step 0"
    ):
        optimizer.step()


def raised_in_torch() -> None:
    torch.optim.lr_scheduler.StepLR(None, 1)  # type: ignore[arg-type]


def test_what_a_package_raises_is_told_where_the_model_file_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arachnec.optimizers.own_scripts.users_frames", lambda error: [])  # as of a class in a package
    span = Span("model.py", 3, 1, 3, 9)
    with pytest.raises(UserError) as caught, told_update(Recipe((), None, None, span), "Prodigy", 2):
        raised_in_torch()
    assert caught.value.diagnostics[0].span == span
    with pytest.raises(TypeError), told_update(Recipe((), torch.optim.AdamW), "AdamW", 2):
        raised_in_torch()
