"""How often and in which order layers are brought: a call counts once whatever it gives back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from arachnec.model_state.cells.flat_layer import FlatLayer
from tests.distributed.executor.cells.test_slots import BLOCKS, Chain, instructions, on_one_rank


class Twice(nn.Module):
    """A block that gives back two tensors, both of which are read."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x)
        return y, y.sin()


class Pairs(Chain):
    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__(order)
        self.blocks = nn.ModuleList(Twice(block) for block in self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for number in self.order:
            first, second = self.blocks[number](x)
            x = x + first * second
        return x.square().sum()


def test_a_call_that_gives_back_two_tensors_is_one() -> None:
    """A layer that runs twice keeps its gradients until the backward has come to both calls."""
    torch.manual_seed(0)
    model = Pairs((0, 1, 0, 2, 3, 4)).double()
    x = torch.rand(3, 8, dtype=torch.float64)
    gradients = torch.autograd.grad(model(x), list(model.parameters()))
    expected = dict(zip((name for name, _ in model.named_parameters()), gradients, strict=True))
    gathering, flats, _ = on_one_rank(model)
    forward, backward = instructions()
    with gathering.forward(forward):
        loss = model(x)
    with gathering.backward(backward, "c"):
        loss.backward()
    for flat in flats:
        assert flat.gradient is not None
        for slot in flat.layout.slots:
            summed = flat.gradient[slot.first : slot.first + slot.size].view(slot.shape)
            torch.testing.assert_close(summed, expected[slot.name])


def test_layers_that_run_in_the_lists_order_are_brought_once_a_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The backward goes through the list from its end: what lies in a slot has been used."""
    brought: list[int] = []
    gather = FlatLayer.gather

    def counted(flat: FlatLayer, *given: object) -> object:
        brought.append(flat.layout.layer)
        return gather(flat, *given)

    monkeypatch.setattr(FlatLayer, "gather", counted)
    model = Chain(tuple(range(BLOCKS)))
    gathering, _, _ = on_one_rank(model)
    forward, backward = instructions()
    with gathering.forward(forward):
        loss = model(torch.rand(3, 8))
    with gathering.backward(backward, "c"):
        loss.backward()
    assert brought == [BLOCKS, *range(BLOCKS), *reversed(range(BLOCKS))]
