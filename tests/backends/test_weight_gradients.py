"""Weight gradients apart from activation gradients: the same gradients, and every product computed once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from arachnec.backends.stage_step import Deferred

linear = torch.ops.aten.linear.default


class Tied(nn.Module):
    """A norm, a linear layer that is used twice, one without bias and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.twice = nn.Linear(8, 8)
        self.plain = nn.Linear(8, 8, bias=False)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(self.plain(self.twice(self.norm(self.twice(x)).relu())))


class Captured(Tied):
    """The same as the graph of a captured block calls it."""

    def forward(self, x: Tensor) -> Tensor:
        x = linear(self.norm(linear(x, self.twice.weight, self.twice.bias)).relu(), self.twice.weight, self.twice.bias)
        return linear(linear(x, self.plain.weight), self.frozen.weight, self.frozen.bias)


def flops(work: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        work()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("kind", [Tied, Captured])
def test_the_two_halves_are_the_whole_backward_and_compute_every_product_once(kind: type[Tied]) -> None:
    torch.manual_seed(0)
    model = kind().double()
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    loss = model(x).square().mean()
    whole = flops(loss.backward)
    expected = {name: p.grad for name, p in model.named_parameters()} | {"x": x.grad}
    for tensor in (*model.parameters(), x):
        tensor.grad = None

    deferred, linear_before = Deferred(graphs=kind is Captured), functional.linear
    with deferred:
        loss = model(x).square().mean()
    assert functional.linear is linear_before
    product = 2 * 2 * 5 * 8 * 8  # of one linear layer
    assert flops(loss.backward) == 4 * product  # activation gradients alone
    assert model.twice.weight.grad is None
    assert model.norm.weight.grad is not None
    assert flops(deferred.run) == 3 * product == whole - 4 * product
    gradients = {name: p.grad for name, p in model.named_parameters()} | {"x": x.grad}
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-12, atol=1e-15, msg=name)
