"""Two blocks are one graph only where everything that they keep beside their weights says the same."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from arachnec.tracing.find import described, structure


@dataclass
class Scale:
    by: Any


class Slotted:
    __slots__ = ("by",)

    def __init__(self, by: float) -> None:
        self.by = by


class Mode(enum.Enum):
    ONE = 1
    TWO = 2


def scaled(number: float) -> Callable[[float], float]:
    return lambda x: x * number


def with_default(number: float) -> Callable[[float], float]:
    def scale(x: float, by: float = number) -> float:
        return x * by

    return scale


def cyclic(number: float) -> list[Any]:
    numbers: list[Any] = [number]
    numbers.append(numbers)
    return numbers


SETTINGS: dict[str, Callable[[float], Any]] = {
    "number": lambda n: n,
    "text": str,
    "mapping": lambda n: {"scale": n},
    "mapping of another key": lambda n: {n: "scale"},
    "nested": lambda n: [({"scale": [n]},)],
    "set": lambda n: {n, 0.0},
    "numpy number": np.float32,
    "numpy": lambda n: np.array([0.0, n]),
    "tensor": lambda n: torch.tensor([0.0, n], dtype=torch.bfloat16),
    "tensor without dimensions": torch.tensor,
    "complex tensor": lambda n: torch.tensor([1j * n]),
    "conjugated tensor": lambda n: torch.tensor([1j * n]).conj(),
    "dtype": lambda n: torch.float32 if n > 1 else torch.bfloat16,
    "enumeration": lambda n: Mode(int(n)),
    "class": lambda n: Scale if n > 1 else Slotted,
    "object": Scale,
    "object in an object": lambda n: Scale(Scale([Scale(n)])),
    "object with slots": Slotted,
    "function of another name": lambda n: scaled if n > 1 else with_default,
    "built-in function": lambda n: torch.add if n > 1 else torch.mul,
    "closure": scaled,
    "closure in a closure": lambda n: partial(map, scaled(n)),
    "default": with_default,
    "partial": lambda n: partial(torch.mul, other=n),
    "method": lambda n: Scale(n).__eq__,
    "within itself": cyclic,
}


def block(**attributes: Any) -> nn.Module:
    layers = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    for name, value in attributes.items():
        setattr(layers[1], name, value)
    return layers


@pytest.mark.parametrize("name", ["setting", "_private"])
@pytest.mark.parametrize("make", SETTINGS.values(), ids=SETTINGS)
def test_settings_that_say_something_else_make_another_structure(make: Callable[[float], Any], name: str) -> None:
    one = structure(block(**{name: make(1.0)}))
    assert one == structure(block(**{name: make(1.0)}))
    assert one != structure(block(**{name: make(2.0)}))
    assert hash(one) is not None


def test_a_hook_makes_another_structure_and_equal_hooks_do_not() -> None:
    plain, first, second = block(), block(), block()
    for hooked in (first, second):
        hooked[1].register_forward_hook(lambda module, args, output: output * 2)
    other = block()
    other[1].register_forward_hook(lambda module, args, output: output * 3)
    assert structure(first) != structure(plain)
    assert len({structure(layers) for layers in (plain, first, other)}) == 3


def test_classes_that_a_function_made_are_other_classes_and_parametrized_ones_are_not() -> None:
    def scaling(by: float) -> nn.Module:
        class Scaling(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x * by

        return Scaling()

    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * x

    assert structure(scaling(1.0)) != structure(scaling(2.0))
    layers = [nn.Linear(2, 2) for _ in range(2)]
    for layer in layers:
        nn.utils.parametrize.register_parametrization(layer, "weight", Doubled())
    assert type(layers[0]) is not type(layers[1])
    assert structure(layers[0]) == structure(layers[1])


def test_what_nothing_is_known_of_is_equal_to_nothing_else() -> None:
    opaque = object()
    assert described(opaque) == described(opaque)
    assert described(opaque) != described(object())
    sparse = torch.eye(2).to_sparse()
    assert described(sparse) == described(sparse)
    assert described(sparse) != described(sparse.clone())


def test_what_a_forward_computed_from_weights_says_nothing() -> None:
    weight = nn.Parameter(torch.rand(2))
    assert described(2 * weight) == described(3 * weight)
    assert described(torch.empty(2, device="meta")) == described(torch.ones(2, device="meta"))
    assert described(torch.empty(2, device="meta")) != described(torch.empty(3, device="meta"))


def test_weights_and_the_modules_that_hold_them_say_nothing() -> None:
    """They are the structure's own, by name and shape; a setting may lead back to the block."""
    one, other = block(), block()
    for layers in (one, other):
        layers[1].owner = types.SimpleNamespace(block=layers, forward=layers.forward)
    assert structure(one) == structure(other)
