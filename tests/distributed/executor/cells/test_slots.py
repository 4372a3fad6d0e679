"""Layers in slots that they take in turn: values and gradients are right whatever order layers run in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from arachnec.ir.nodes import Instruction
from arachnec.ir.parameter_cells import HELD
from arachnec.ir.values import Attributes
from arachnec.model_state.cells.flat_layer import FlatLayer, layouts_of
from arachnec.model_state.cells.gathering import Gathering, Slots, ends_of, slot_of
from arachnec.runtime.device_runtime import DeviceRuntime
from arachnec.runtime.host_copies import HostCopies

BLOCKS, WIDTHS = 5, (8, 24, 8, 16, 8)
CPU = torch.device("cpu")


class Chain(nn.Module):
    """Blocks of several sizes, run in the ``order``, some of them twice."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.order, self.scale = order, nn.Parameter(torch.rand(8))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8)) for width in WIDTHS
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for number in self.order:
            x = x + self.blocks[number](x)
        return x.square().sum()


def instructions() -> tuple[Instruction, Instruction]:
    blocks, every = tuple(range(BLOCKS)), (BLOCKS, *range(BLOCKS))
    forward = Attributes.of(gather=every, release=blocks, held=HELD)
    backward = Attributes.of(gather=blocks, release=every, scatter=every, held=HELD)
    return Instruction("forward", "c", (0,), forward), Instruction("backward", "c", (0,), backward)


def on_one_rank(model: Chain) -> tuple[Gathering, list[FlatLayer], Slots]:
    """The model's layers in the host of a rank alone, whose copies stand for the gathers of a cell."""
    parameters = dict(model.named_parameters())
    numbers = {name: int(name.split(".")[1]) if "blocks" in name else BLOCKS for name in parameters}
    layouts, copies = layouts_of(parameters, numbers, 1), HostCopies(DeviceRuntime.of(CPU))
    slots, flats = Slots.of([(layouts, BLOCKS)], CPU), []
    for layout in layouts:
        shard = torch.cat([parameters[slot.name].detach().reshape(-1) for slot in layout.slots])
        (whole,) = slots.places(layout.layer, BLOCKS, [layout])
        named = {slot.name: parameters[slot.name] for slot in layout.slots}
        flats.append(FlatLayer.of(layout, shard, whole, named, 0, copies))
    slots.drop()
    modules = dict(enumerate(model.blocks))
    return Gathering({flat.layout.layer: [flat] for flat in flats}, modules, None, slots), flats, slots


def bytes_in(slots: Slots) -> int:
    return sum(slot.buffer.untyped_storage().size() for slot in slots.slots.values())


@pytest.mark.parametrize(
    "order",
    [(0, 1, 2, 3, 4), (0, 2, 1, 4, 3), (3, 0, 1, 2, 4), (4, 3, 2, 1, 0), (0, 1, 0, 2, 3, 4), (0, 2, 4, 1, 3, 0)],
    ids=str,
)
def test_gradients_are_those_of_the_whole_model(order: tuple[int, ...]) -> None:
    """Two cascades, as the second finds other layers in the slots than the first did."""
    torch.manual_seed(0)
    model = Chain(order).double()
    inputs = [torch.rand(3, 8, dtype=torch.float64) for _ in range(2)]
    losses = [model(x) for x in inputs]
    gradients = torch.autograd.grad(sum(losses), list(model.parameters()))
    expected = dict(zip((name for name, _ in model.named_parameters()), gradients, strict=True))
    gathering, flats, slots = on_one_rank(model)
    forward, backward = instructions()
    for x, right in zip(inputs, losses, strict=True):
        with gathering.forward(forward):
            loss = model(x)
        torch.testing.assert_close(loss, right)
        with gathering.backward(backward, "c"):
            loss.backward()
    for flat in flats:
        assert flat.gradient is not None
        for slot in flat.layout.slots:
            summed = flat.gradient[slot.first : slot.first + slot.size].view(slot.shape)
            torch.testing.assert_close(summed, expected[slot.name])
    slots.drop()
    assert bytes_in(slots) == 0


def test_slots_have_the_memory_of_the_largest_layers_that_lay_in_them() -> None:
    """And have it at the same address from one cascade to the next."""
    torch.manual_seed(0)
    gathering, flats, slots = on_one_rank(Chain(tuple(range(BLOCKS))))
    model, (forward, backward) = gathering.modules, instructions()
    largest = [0] * (HELD + 1)
    for flat in flats:
        number = slot_of(flat.layout.layer, BLOCKS)
        largest[number] = max(largest[number], ends_of([flat.layout])[-1])
    addresses = []
    for _ in range(3):
        x = torch.rand(3, 8, requires_grad=True)
        with gathering.forward(forward):
            y = x
            for number in range(BLOCKS):
                y = model[number](y)
        with gathering.backward(backward, "c"):
            y.sum().backward()
        assert bytes_in(slots) == sum(largest)
        addresses.append([flat.whole.data_ptr() for flat in flats])
    assert addresses[1] == addresses[2]
    assert len({flat.whole.untyped_storage().data_ptr() for flat in flats}) == HELD + 1
