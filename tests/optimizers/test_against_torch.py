"""Optimizers, groups and schedules do what a plain loop of PyTorch with them does; checkpoints carry their state."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from arachnec.checkpoint.parts import part_of
from arachnec.executable.training_options import Group, Schedule, TorchClass, Training
from arachnec.ir.diagnostic import UserError
from arachnec.model_state.optimizer import Optimizer
from arachnec.optimizers.classes import constructed, optimizer_class
from arachnec.optimizers.recipe import recipe_of
from arachnec.optimizers.schedules import LOOKED, Rates, demand_schedule
from arachnec.optimizers.state import nbytes, state_bytes

ARGUMENTS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "weight_decay": 0.1},
    "Adam": {},
    "AdamW": {"weight_decay": 0.1},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "Adagrad": {},
    "Adadelta": {},
    "RMSprop": {"momentum": 0.5},
    "Rprop": {},
    "ASGD": {},
    "Adafactor": {},
}


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))


def give_gradients(module: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for value in module.parameters():
        value.grad = torch.randn(value.shape, generator=generator)


def named(module: nn.Module) -> dict[str, torch.Tensor]:
    return dict(module.named_parameters())


def training(name: str, **more: Any) -> Training:
    return Training(lr=0.05, clip_norm=0, optimizer=TorchClass(name, ARGUMENTS.get(name, {})), **more)


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_optimizer_by_name_is_torchs_and_goes_on_from_its_checkpoint(name: str) -> None:
    ours, theirs = network(), network()
    optimizer = Optimizer(named(ours), training(name))
    reference = getattr(torch.optim, name)(theirs.parameters(), lr=0.05, **ARGUMENTS[name])
    for seed in range(5):
        if seed == 3:  # another run, which has nothing but the checkpoint
            kept = {key: part_of(value).values.clone() for key, value in optimizer.tensors().items()}
            ours = network()
            optimizer = Optimizer(named(ours), training(name))
            for key, value in optimizer.tensors().items():
                part_of(value).values.copy_(kept[key])
            optimizer.round_parameters()
            optimizer.done = 3
        give_gradients(ours, seed)
        give_gradients(theirs, seed)
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)


@pytest.mark.parametrize("name", ["AdamW", "NAdam", "SGD", "Adafactor"])
def test_a_parameter_that_had_no_gradient_before_the_checkpoint_begins_anew_after_it(name: str) -> None:
    ours, theirs = network(), network()
    optimizer = Optimizer(named(ours), training(name))
    reference = getattr(torch.optim, name)(theirs.parameters(), lr=0.05, **ARGUMENTS[name])
    for seed in range(4):
        for module in (ours, theirs):
            give_gradients(module, seed)
            if seed < 2:
                module[0].bias.grad = None  # type: ignore[index,union-attr]
        optimizer.step()
        reference.step()
        if seed == 1:
            optimizer.tensors()  # what a checkpoint does
    assert_same(ours, theirs)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_state_is_counted_as_the_optimizer_makes_it(name: str) -> None:
    module = network()
    recipe = recipe_of(named(module.to("meta")), training(name))
    real = network()
    reference = getattr(torch.optim, name)(real.parameters(), lr=0.05, **ARGUMENTS[name])
    give_gradients(real, 0)
    reference.step()
    assert state_bytes(named(module), recipe) == sum(nbytes(state) for state in reference.state.values())


def test_a_parameter_has_the_arguments_of_the_first_group_it_fits() -> None:
    groups = (Group(match=("2.*",), arguments={"lr": 0.2}), Group(dimensions=1, arguments={"weight_decay": 0.0}))
    ours, theirs = network(), network()
    optimizer = Optimizer(named(ours), training("AdamW", groups=groups))
    plain = named(theirs)
    reference = torch.optim.AdamW(
        [
            {"params": [plain["2.weight"], plain["2.bias"]], "lr": 0.2},
            {"params": [plain["0.bias"], plain["1.weight"], plain["1.bias"]], "weight_decay": 0.0},
            {"params": [plain["0.weight"]]},
        ],
        lr=0.05,
        weight_decay=0.1,
    )
    for seed in range(3):
        give_gradients(ours, seed)
        give_gradients(theirs, seed)
        optimizer.step()
        reference.step()
    assert_same(ours, theirs)


SCHEDULES: dict[str, tuple[dict[str, Any], Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]]] = {
    "CosineAnnealingLR": ({"T_max": 6}, lambda o: lr_scheduler.CosineAnnealingLR(o, 6)),
    "StepLR": ({"step_size": 2, "gamma": 0.5}, lambda o: lr_scheduler.StepLR(o, 2, 0.5)),
    "PolynomialLR": ({"total_iters": 5}, lambda o: lr_scheduler.PolynomialLR(o, 5)),
    "OneCycleLR": (
        {"max_lr": 0.3, "total_steps": 8},
        lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=8),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_by_name_moves_rates_and_betas_as_torch_does(name: str) -> None:
    arguments, scheduler_of = SCHEDULES[name]
    ours, theirs = network(), network()
    schedule = Schedule(scheduler=TorchClass(name, arguments))
    optimizer = Optimizer(named(ours), training("AdamW", schedule=schedule))
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.05, weight_decay=0.1)
    scheduler = scheduler_of(reference)
    for seed in range(7):
        give_gradients(ours, seed)
        give_gradients(theirs, seed)
        optimizer.step()
        reference.step()
        assert math.isclose(optimizer.rate, scheduler.get_last_lr()[0], rel_tol=1e-12)
        scheduler.step()
    assert_same(ours, theirs)


def test_warm_up_rises_linearly_and_the_scheduler_counts_from_its_end() -> None:
    schedule = Schedule(warmup=4, scheduler=TorchClass("CosineAnnealingLR", {"T_max": 6}))
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    rising = lr_scheduler.LinearLR(optimizer, start_factor=1 / 4, total_iters=3)
    expected = []
    for _ in range(4):
        expected.append(rising.get_last_lr()[0])
        optimizer.step()
        rising.step()
    falling = lr_scheduler.CosineAnnealingLR(optimizer, 6)
    for _ in range(6):
        expected.append(falling.get_last_lr()[0])
        optimizer.step()
        falling.step()
    rates = Rates(schedule, [{"lr": 0.1}])
    assert [rates.at(step)[0]["lr"] for step in range(10)] == pytest.approx(expected)
    assert Rates(schedule, [{"lr": 0.1}]).at(7)[0]["lr"] == pytest.approx(expected[7]), "a resumed run has it too"


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("CosineAnnealingLR", {"T_max": 0}),
        ("CosineAnnealingLR", {"T_max": 4, "eta_min": "a"}),
        ("CyclicLR", {"base_lr": 0.1, "max_lr": 1.0, "step_size_up": 0}),
        ("StepLR", {"step_size": 0}),
        ("ExponentialLR", {"gamma": "a"}),
    ],
)
def test_arguments_that_a_scheduler_cannot_step_with_are_refused(name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(
        UserError, match=r"refuses its arguments|cannot take a step with these arguments|expected float"
    ):
        demand_schedule(Schedule(scheduler=TorchClass(name, arguments)), [{"lr": 0.1, "momentum": 0.9}])


@pytest.mark.parametrize(
    ("name", "arguments", "step"),
    [
        ("StepLR", {"step_size": 1, "gamma": -1.0}, 1),
        ("LinearLR", {"start_factor": 1.0, "end_factor": 0.0, "total_iters": 4}, None),
        ("ExponentialLR", {"gamma": -0.5}, 1),
        ("PolynomialLR", {"total_iters": 5, "power": -1.0}, 4),
        ("OneCycleLR", {"max_lr": -0.3, "total_steps": 8}, 0),
        ("StepLR", {"step_size": 500, "gamma": -1.0}, 500),
    ],
)
def test_rates_that_nobody_trains_with_are_refused_at_the_latest_in_their_step(
    name: str, arguments: dict[str, Any], step: int | None
) -> None:
    schedule, groups = Schedule(scheduler=TorchClass(name, arguments)), [{"lr": 0.1, "momentum": 0.9}]
    if step is None or step >= LOOKED:
        demand_schedule(schedule, groups, 8)
    if step is None:
        return
    with pytest.raises(UserError, match=f"{name} gives step {step} the learning rate -|cannot take a step"):
        if step < LOOKED:
            demand_schedule(schedule, groups, 8)
        else:
            Rates(schedule, groups).at(step)


@pytest.mark.parametrize("name", [*ARGUMENTS, "Muon"])
def test_an_optimizers_arguments_are_of_the_types_that_torch_states(name: str) -> None:
    """torch takes ``capturable = "no"`` for true, and says nothing."""
    kind = optimizer_class(name)
    parameters = [nn.Parameter(torch.zeros(2, 2))]
    for argument in list(inspect.signature(kind).parameters.values())[1:]:
        default = list(argument.default) if isinstance(argument.default, tuple) else argument.default
        constructed(kind, parameters, "optimizer", {argument.name: default})
        wrong = {} if argument.name == "adjust_lr_fn" else "no"
        with pytest.raises(UserError, match=f"`optimizer.{argument.name}` is .*: expected "):
            constructed(kind, parameters, "optimizer", {argument.name: wrong})


class Growing(torch.optim.SGD):
    """Keeps one more tensor from update ``late`` on."""

    late = 2

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for value in group["params"]:
                count = self.state[value].get("count", 0) + 1
                self.state[value]["count"] = count
                if count >= self.late:
                    self.state[value]["surprise"] = torch.zeros_like(value)


@pytest.mark.parametrize("late", [2, 5])
def test_state_that_was_not_counted_is_refused(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Growing, "late", late)
    module = network()
    plain = Training(lr=0.05, clip_norm=0)
    optimizer = Optimizer(named(module), plain, recipe=recipe_of(named(module), plain, lambda p: Growing(p, lr=0.1)))
    for update in range(late - 1):
        give_gradients(module, update)
        optimizer.step()
    give_gradients(module, late)
    with pytest.raises(UserError) as caught:
        optimizer.step()
    (diagnostic,) = caught.value.diagnostics
    assert "keeps `surprise` of" in diagnostic.message


class Listing(torch.optim.SGD):
    """Keeps something that is no tensor and no number."""

    def step(self, closure: Any = None) -> None:
        for value in self.param_groups[0]["params"]:
            self.state[value]["norms"] = [1.0]


class SlowWeights(torch.optim.SGD):
    """Keeps tensors in a dict of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.slow: dict[Any, Any] = {}

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.slow |= {value: value.detach().clone() for value in self.param_groups[0]["params"]}


class Around(torch.optim.SGD):
    """Has another optimizer update, which keeps a state of its own."""

    def __init__(self, params: Any, **options: Any) -> None:
        self.base = torch.optim.AdamW(params, **options)
        super().__init__(self.base.param_groups, **options)

    def step(self, closure: Any = None) -> None:
        self.base.step(closure)


class Several(torch.optim.SGD):
    """Has a list of others."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, **options)
        self.all = [torch.optim.AdamW(self.param_groups[0]["params"], **options)]

    def step(self, closure: Any = None) -> None:
        for one in self.all:
            one.step()


class Lazy(torch.optim.SGD):
    """Makes what it wraps in its first update."""

    def step(self, closure: Any = None) -> None:
        if not hasattr(self, "inner"):
            self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.1)
        self.inner.step()


class Broken(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise ZeroDivisionError("of a norm")


def test_state_that_no_checkpoint_holds_is_refused_before_launch() -> None:
    recipe = recipe_of(named(network()), Training(), lambda p: Listing(p, lr=0.1))
    with pytest.raises(UserError, match="Listing keeps `norms`, a list, which no checkpoint holds"):
        state_bytes(named(network()), recipe)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (SlowWeights, "SlowWeights keeps `slow`, a dict, which no checkpoint holds"),
        (Several, "Several keeps `all`, an AdamW with a state of its own, which no checkpoint holds"),
        (Lazy, "Lazy keeps `param_groups`, a group or an optimizer made in an update, which no checkpoint holds"),
        (Around, "Around keeps `base`, an AdamW with a state of its own, which no checkpoint holds"),
    ],
)
def test_state_beside_that_of_the_parameters_is_refused_before_launch(kind: Any, says: str) -> None:
    recipe = recipe_of(named(network()), Training(), lambda p: kind(p, lr=0.1))
    with pytest.raises(UserError, match=says):
        state_bytes(named(network()), recipe)


def test_an_own_optimizer_is_called_by_its_class_wherever_it_was_given() -> None:
    recipe = recipe_of(named(network()), Training(), lambda p: Listing(p, lr=0.1))
    assert recipe.name == "Listing"
    with pytest.raises(UserError, match="`optimizer` was given, and the training options have an optimizer"):
        recipe_of(named(network()), Training(groups=(Group(match=("*",)),)), lambda p: Listing(p, lr=0.1))


def test_what_an_own_class_raises_is_told_at_its_line() -> None:
    recipe = recipe_of(named(network()), Training(), lambda p: Broken(p, lr=0.1))
    with pytest.raises(UserError, match="ZeroDivisionError: of a norm") as told:
        state_bytes(named(network()), recipe)
    span = told.value.diagnostics[0].span
    assert span is not None
    told_line = Path(__file__).read_text().splitlines()[span.line - 1].strip()
    assert (span.file, told_line) == (__file__, 'raise ZeroDivisionError("of a norm")')


def test_the_model_files_own_elementwise_optimizer_keeps_its_groups() -> None:
    module = network()
    groups = recipe_of(
        named(module),
        Training(),
        lambda p: torch.optim.AdamW(
            [{"params": [v for v in p if v.ndim > 1]}, {"params": [v for v in p if v.ndim < 2], "weight_decay": 0.0}],
            lr=0.3,
        ),
    )
    assert groups.elementwise
    assert [group.names for group in groups.groups] == [
        ("0.weight", "2.weight"),
        ("0.bias", "1.weight", "1.bias", "2.bias"),
    ]
    assert [group.arguments["weight_decay"] for group in groups.groups] == [0.01, 0.0]


@pytest.mark.parametrize(
    ("user", "reason"),
    [
        (lambda p: None, "returned a NoneType"),
        (lambda p: torch.optim.SGD(p[:2], lr=0.1), "leaves out 4 parameters"),
        (lambda p: torch.optim.SGD([nn.Parameter(v.detach().clone()) for v in p]), "that it was not given"),
        (lambda p: torch.optim.LBFGS(p), "returned a LBFGS: it computes the loss again"),
        (torch.optim.Muon, "raised ValueError: Muon only supports 2D parameters"),
    ],
)
def test_a_function_that_makes_no_optimizer_of_these_parameters_is_refused(user: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        recipe_of(named(network()), Training(), user)
