"""A model built parameter by parameter has the values of a plain build, and is never whole in memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from arachnec.models.streamed_build import OtherConstruction, streamed_build, watched_build
from tests.distributed.live_tensors import Live

WIDTH, LAYERS = 64, 8
LARGEST = 4 * 4 * WIDTH * WIDTH  # bytes of a layer's largest parameter


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)) for _ in range(LAYERS)]
        )
        self.register_buffer("table", torch.tensor([1.0, 2.0]))


class DrawnAgain(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.apply(self.draw)

    def draw(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.orthogonal_(module.weight[:8])
            nn.init.zeros_(module.bias)


class Scaled(Layers):
    def __init__(self) -> None:
        super().__init__()
        for number, layer in enumerate(self.layers):
            with torch.no_grad():
                layer[1].weight.mul_(number)


class Tied(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.layers[7][1].weight = self.layers[0][1].weight
        self.transposed = nn.Parameter(torch.randn(8, 4).t())
        both = torch.randn(6)
        self.left, self.right = nn.Parameter(both[:2]), nn.Parameter(both[2:])
        self.replaced = nn.Parameter(torch.zeros(3))
        self.replaced.data = torch.rand(5)


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return build()


def streamed(build: Callable[[], nn.Module]) -> tuple[dict[str, Tensor], nn.Module]:
    values: dict[str, Tensor] = {}

    def keep(name: str, value: Tensor) -> None:
        assert name not in values
        values[name] = value.clone()

    _, construction = watched_build(lambda: seeded(build))
    return values, streamed_build(lambda: seeded(build), construction, keep)


CASES = {
    "plain": Layers,
    "drawn-again": DrawnAgain,
    "scaled": Scaled,
    "tied": Tied,
    "cast": lambda: Layers().to(torch.bfloat16),
    "cast-and-drawn-again": lambda: DrawnAgain().double(),
    "cast-twice": lambda: Layers().double().to(torch.bfloat16),
}


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_is_handed_over_once_with_the_values_of_a_plain_build(case: str) -> None:
    expected = seeded(CASES[case])
    after = torch.rand(3)
    values, model = streamed(CASES[case])
    assert torch.equal(torch.rand(3), after)
    assert set(values) == {name for name, _ in expected.named_parameters()}
    for name, value in expected.named_parameters():
        assert values[name].dtype == value.dtype
        assert torch.equal(values[name], value), name
    assert all(not value.untyped_storage().nbytes() for value in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), expected.buffers(), strict=True))


@pytest.mark.parametrize("case", ["plain", "drawn-again", "scaled", "cast"])
def test_a_model_is_never_whole(case: str) -> None:
    """A weight at a time, what its constructor makes beside it, and where it is changed in the end, its neighbours."""
    _, construction = watched_build(lambda: seeded(CASES[case]))
    with Live() as live:
        streamed_build(lambda: seeded(CASES[case]), construction, lambda name, value: None)
    whole = sum(value.numel() * 4 for value in Layers().parameters())
    assert live.peak <= (whole + LARGEST if case == "scaled" else 3.2 * LARGEST)


def test_a_constructor_that_goes_another_way_is_noticed() -> None:
    class Other(Layers):
        def __init__(self) -> None:
            super().__init__()
            if self.layers[0][1].weight.device == torch.device("meta"):
                return
            self.layers[0][1].weight.data.mul_(2)

    with pytest.raises(OtherConstruction):
        streamed(Other)


@pytest.mark.parametrize("case", ["plain", "scaled", "cast", "cast-twice"])
def test_parameters_that_come_from_files_are_not_drawn_and_buffers_have_their_values(case: str) -> None:
    _, construction = watched_build(lambda: seeded(CASES[case]))
    model = streamed_build(lambda: seeded(CASES[case]), construction, None)
    after = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(3), after)
    assert all(not value.untyped_storage().nbytes() for value in model.parameters())
    expected = CASES[case]()
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), expected.buffers(), strict=True))
    assert [value.dtype for value in model.parameters()] == [value.dtype for value in expected.parameters()]


@pytest.mark.parametrize(
    "read", [torch.norm, torch.Tensor.double, lambda weight: weight.new_zeros(WIDTH).add_(weight[0])]
)
def test_what_follows_from_a_parameter_is_not_made_of_one_without_values(read: Callable[[Tensor], Tensor]) -> None:
    class Following(Layers):
        def __init__(self) -> None:
            super().__init__()
            with torch.no_grad():
                self.register_buffer("followed", read(self.layers[0][1].weight) * 2, persistent=False)

    _, construction = watched_build(lambda: seeded(Following))
    with pytest.raises(OtherConstruction):
        streamed_build(lambda: seeded(Following), construction, None)
