"""Arguments as trees of tensors: every kind of record is taken apart and put together again as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from arachnec.models.argument_trees import flatten


@dataclass
class Counted:
    x: Tensor
    times: InitVar[int]
    mask: Tensor | None = None
    made: int = field(init=False, default=0)

    def __post_init__(self, times: int) -> None:
        self.x = self.x * times  # not to be done again
        self.made, self.note = 1, "kept"

    @cached_property
    def total(self) -> Tensor:
        return self.x.sum()


@dataclass(frozen=True, slots=True, kw_only=True)
class Slotted:
    inner: Counted
    pair: tuple[Tensor, None]


class Named(NamedTuple):
    x: Tensor
    scale: float = 1.0


def nested() -> Slotted:
    counted = Counted(torch.ones(2), 3)
    assert counted.total == 6
    return Slotted(inner=counted, pair=(torch.zeros(1), None))


@pytest.mark.parametrize("make", [nested, lambda: Named(torch.ones(2)), lambda: SimpleNamespace(n=3, x=torch.ones(2))])
def test_a_record_is_put_together_as_it_was(make: Callable[[], Any]) -> None:
    leaves, spec = flatten({"a": [make(), 5]})
    assert any(isinstance(leaf, Tensor) for leaf in leaves)
    assert flatten({"a": [make(), 5]})[1] == spec  # calls of one form have one spec
    again = pytree.tree_unflatten(leaves, spec)["a"][0]
    assert type(again) is type(make()) and repr(again) == repr(make())


def test_what_an_instance_keeps_beside_its_fields_stays() -> None:
    leaves, spec = flatten(nested())
    again = pytree.tree_unflatten(leaves, spec).inner
    assert again.note == "kept" and again.made == 1
    assert torch.equal(again.x, torch.full((2,), 3.0)) and again.total == 6
