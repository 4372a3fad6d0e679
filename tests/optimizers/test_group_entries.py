"""An optimizer that remembers numbers in its groups, and has other weights to use than to train, goes on exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from arachnec.checkpoint.parts import part_of
from arachnec.executable.training_options import Schedule, Training
from arachnec.ir.diagnostic import UserError
from arachnec.model_state.optimizer import Optimizer
from arachnec.optimizers.recipe import Recipe, recipe_of
from arachnec.optimizers.state import KeptEntries, kept_state, state_bytes

PLAIN = Training(lr=0.1, clip_norm=0)


class Averaging(torch.optim.Optimizer):
    """As schedule-free optimizers and D-Adaptation: a count and an estimate in the group, an average of the weights in
    the state, which takes the weights' place in ``eval``."""

    def __init__(self, params: Any, **more: Any) -> None:
        super().__init__(params, {"lr": 0.1, "k": 0, "estimate": torch.tensor(1e-3), "training": False, **more})
        self.largest = 0.0

    def train(self) -> None:
        self._switch(True)

    def eval(self) -> None:
        self._switch(False)

    @torch.no_grad()
    def _switch(self, training: bool) -> None:
        for group in self.param_groups:
            if group["training"] != training:
                for value in group["params"]:
                    state = self.state[value]
                    if state:
                        # Rounding makes it another number than before, there and back.
                        value.lerp_(state["z"], 1 - 1 / 0.9 if not training else 1 - 0.9)
            group["training"] = training

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not group["training"]:
                raise RuntimeError("not in train mode")
            group["k"] += 1
            for value in group["params"]:
                if value.grad is None:
                    continue
                state = self.state[value]
                if not state:
                    state["step"] = 0  # and it stays: some count in the group alone
                    state["z"] = value.clone()
                    state["p0"] = value.clone() if value.any() else torch.tensor(0, dtype=value.dtype)
                self.largest = max(self.largest, float(value.grad.abs().max()))
                group["estimate"] = group["estimate"] * 1.5 + self.largest * 1e-3
                state["z"] -= group["estimate"] * group["k"] * value.grad
                value.lerp_(state["z"], 0.3).sub_(0.01 * (value - state["p0"]))


def network() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    nn.init.zeros_(net[1].bias)  # type: ignore[arg-type]
    return net


def named(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters())


def recipe(module: nn.Module, kind: Any = Averaging) -> Recipe:
    return recipe_of(named(module), PLAIN, lambda p: kind(p))


def optimizer_of(module: nn.Module, kind: Any = Averaging) -> Optimizer:
    return Optimizer(named(module), PLAIN, recipe=recipe(module, kind))


def update(module: nn.Module, optimizer: Optimizer, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for value in module.parameters():
        value.grad = torch.randn(value.shape, generator=generator)
    optimizer.step()


@torch.no_grad()
def resumed(module: nn.Module, optimizer: Optimizer, kind: Any = Averaging) -> tuple[nn.Module, Optimizer]:
    """Another module and optimizer, filled as from a checkpoint."""
    stored = {name: part_of(value).values.clone() for name, value in optimizer.tensors().items()}
    other = network()
    for value in other.parameters():
        value.fill_(9.0)
    own = optimizer_of(other, kind)
    for name, value in own.tensors().items():
        part_of(value).values.copy_(stored[name])
    own.round_parameters()
    own.take_entries(optimizer.entries())
    return other, own


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))


def test_a_resumed_run_is_the_uninterrupted_one() -> None:
    module = network()
    optimizer = optimizer_of(module)
    for number in range(3):
        update(module, optimizer, number)
    other, own = resumed(module, optimizer)
    assert "estimate" in optimizer.entries()
    assert "largest" in optimizer.entries()
    for number in range(3, 6):
        update(module, optimizer, number)
        update(other, own, number)
    assert equal(module, other)
    group, there = optimizer.torch.param_groups[0], own.torch.param_groups[0]
    assert (group["k"], float(group["estimate"])) == (there["k"], float(there["estimate"]))
    assert there["k"] == 6


def test_entries_of_other_groups_are_refused() -> None:
    optimizer = optimizer_of(network())
    update(network(), optimizer, 0)
    two = optimizer_of(network(), lambda p: Averaging([{"params": p[:1]}, {"params": p[1:]}]))
    with pytest.raises(UserError, match="another number of groups"):
        two.take_entries(optimizer.entries() or "[]")


def test_weights_are_switched_before_they_are_used_and_train_on_to_the_bit() -> None:
    module, plain = network(), network()
    optimizer, undisturbed = optimizer_of(module), optimizer_of(plain)
    for number in range(4):
        update(module, optimizer, number)
        update(plain, undisturbed, number)
        with optimizer.in_use():
            assert not equal(module, plain)
        in_use = optimizer.weights_in_use()
        assert equal(module, plain)
        assert all(not torch.equal(in_use[name], value) for name, value in named(module).items())
    assert not optimizer_of(network(), torch.optim.AdamW).weights_in_use()


def test_a_checkpoint_in_between_changes_nothing() -> None:
    module, plain = network(), network()
    optimizer, undisturbed = optimizer_of(module), optimizer_of(plain)
    for number in range(5):
        optimizer.weights_in_use(), optimizer.tensors(), optimizer.entries()
        update(module, optimizer, number)
        update(plain, undisturbed, number)
    assert equal(module, plain)


def test_what_is_kept_is_counted_on_drawn_numbers() -> None:
    module = network()
    own = recipe(module)
    kept = kept_state(own, own.groups[0], (4, 3), torch.float32)
    assert kept["p0"].shape == kept["z"].shape == (4, 3)
    assert state_bytes(named(module), own) == 2 * 4 * sum(value.numel() for value in module.parameters())


class Remembering(torch.optim.SGD):
    """Keeps something that is no number where no checkpoint looks."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.param_groups[0]["history"] = {1.0}


class Global(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.state["all"] = {"norm": 1.0}  # type: ignore[index]


@pytest.mark.parametrize(("kind", "told"), [(Remembering, "keeps `history`, a set"), (Global, "keeps `all`")])
def test_what_no_checkpoint_holds_is_refused_before_launch(kind: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        state_bytes(named(network()), recipe(network(), kind))


class OwnRate(torch.optim.SGD):
    """Sets its own rate, as hypergradient descent does."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.param_groups[0]["lr"] *= 0.5


def test_a_rate_that_updates_set_is_left_to_them() -> None:
    module, reference = network(), network()
    optimizer = optimizer_of(module, lambda p: OwnRate(p, lr=0.4))
    plain = OwnRate(reference.parameters(), lr=0.4)
    for number in range(4):
        update(module, optimizer, number)
        generator = torch.Generator().manual_seed(number)
        for value in reference.parameters():
            value.grad = torch.randn(value.shape, generator=generator)
        plain.step()
    assert optimizer.rate == pytest.approx(0.4 / 16)
    assert equal(module, reference)


class Relative(torch.optim.Optimizer):
    """As Adafactor with ``lr=None``: a rate by its own count of updates."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for value in self.param_groups[0]["params"]:
            state = self.state[value]
            state["step"] = state.get("step", 0) + 1
            value -= value.grad / state["step"]


def test_an_optimizer_without_a_rate_finds_it_itself_and_takes_no_schedule() -> None:
    module = network()
    optimizer = optimizer_of(module, Relative)
    before = module[0].bias.detach().clone()  # type: ignore[index, union-attr]
    update(module, optimizer, 0)
    assert not torch.equal(before, module[0].bias)  # type: ignore[index, arg-type]
    assert optimizer.rate == 0.0
    with pytest.raises(UserError, match="finds its rate itself"):
        Optimizer(named(module), Training(schedule=Schedule(warmup=3)), recipe=recipe(module, Relative))


class Listing(torch.optim.SGD):
    """Knows its parameters, and what it keeps for them, by lists of its own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.known = [value for group in self.param_groups for value in group["params"]]
        self.sums: list[Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if not self.sums:
            self.sums = [torch.zeros(2) for _ in self.known]
        for value, total in zip(self.known, self.sums, strict=True):
            if value.grad is not None:
                total += value.grad.abs().sum()
                value.add_(value.grad, alpha=-0.1 / float(1 + total[0]))


def test_lists_of_parameters_stay_those_of_the_resumed_optimizer() -> None:
    module = network()
    optimizer = optimizer_of(module, Listing)
    for number in range(3):
        update(module, optimizer, number)
    other, own = resumed(module, optimizer, Listing)
    assert "known" not in optimizer.entries() and "sums" in optimizer.entries()
    for number in range(3, 6):
        update(module, optimizer, number)
        update(other, own, number)
    assert equal(module, other)


class Measuring(torch.optim.SGD):
    """Has a rate of its own that it learns, and figures about its updates."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.rate = nn.Parameter(torch.ones(()))
        self.figures: dict[str, float] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.rate.mul_(0.9)
        for value in self.param_groups[0]["params"]:
            value.add_(value.grad, alpha=-0.1 * float(self.rate))
            self.figures["norm"] = float(value.grad.norm())


def test_a_parameter_of_its_own_and_a_dict_of_figures_are_kept() -> None:
    module = network()
    optimizer = optimizer_of(module, Measuring)
    for number in range(3):
        update(module, optimizer, number)
    other, own = resumed(module, optimizer, Measuring)
    assert own.torch.figures == optimizer.torch.figures
    for number in range(3, 6):
        update(module, optimizer, number)
        update(other, own, number)
    assert equal(module, other)


class Estimating(torch.optim.Optimizer):
    """Its groups begin with one tensor, torch's default, and go on with their own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "d": torch.tensor(1.0)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for number, group in enumerate(self.param_groups, 2):
            group["d"] = group["d"] * number


def test_groups_that_begin_with_one_tensor_resume_with_their_own() -> None:
    def fresh() -> Estimating:
        return Estimating([{"params": [nn.Parameter(torch.ones(2))]} for _ in range(2)])

    optimizer, other = fresh(), fresh()
    entries = KeptEntries(optimizer)
    with entries.watched():
        optimizer.step()
    KeptEntries(other).take(entries.text())
    assert [float(group["d"]) for group in other.param_groups] == [2.0, 3.0]
    assert float(other.defaults["d"]) == 1.0


class Doubling(torch.optim.Optimizer):
    """Knows one tensor in every group and in an attribute, and changes it in place."""

    def __init__(self, params: Any) -> None:
        self.d = torch.tensor(1.0)
        super().__init__(params, {"lr": 0.1, "d": self.d})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.d.mul_(2)


def test_a_tensor_that_groups_and_the_optimizer_share_stays_one() -> None:
    optimizer, other = (Doubling([{"params": [nn.Parameter(torch.ones(2))]} for _ in range(2)]) for _ in range(2))
    entries = KeptEntries(optimizer)
    with entries.watched():
        optimizer.step()
    KeptEntries(other).take(entries.text())
    other.step()
    assert [float(group["d"]) for group in other.param_groups] == [4.0, 4.0]
    assert float(other.d) == 4.0
