"""What parts of a model take, with a clock that counts products of matrices: every part has its own, each once."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from arachnec.backends.stage_step import _Product
from arachnec.profiling.parts import Layers, timed_parts

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.addmm.out)


class Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in PRODUCTS
        return func(*args, **(kwargs or {}))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(
            [nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), nn.Linear(8, 8)]
        )
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def test_every_part_has_its_products_in_every_phase() -> None:
    model = Model()
    layers = Layers((("blocks.0", "One"), ("blocks.1", "Two"), ("blocks.2", "One")))
    with Products() as products:
        times = timed_parts(model, layers, lambda: model(torch.ones(3, 4)).sum(), lambda: products.count / 1e3)
    counts = {phase: round(count) for phase, count in zip(layers.phases, times, strict=True)}
    for part, forward, backward, activation, weight in (
        ("One", 1, 2, 1, 1),  # of a block
        ("Two", 2, 4, 2, 2),
        ("first", 1, 1, 0, 1),  # nobody waits for a gradient of the input
        ("last", 1, 2, 1, 1),
    ):
        counted = tuple(counts[f"{part}:{phase}"] for phase in ("forward", "backward", "activation", "weight"))
        assert counted == (forward, backward, activation, weight), part


def test_nothing_of_a_split_backward_stays() -> None:
    """A graph that held its own products would keep a micro-batch's activations for every measurement."""
    model = Model()
    layers = Layers((("blocks.0", "One"), ("blocks.1", "Two"), ("blocks.2", "One")))
    before = _products()
    timed_parts(model, layers, lambda: model(torch.ones(3, 4)).sum(), lambda: 0.0)
    assert _products() == before


def _products() -> int:
    gc.collect()
    return sum(type(value) is _Product for value in gc.get_objects())
