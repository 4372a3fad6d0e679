"""Layers and inputs from the host's memory on a device with streams: no thread of a cascade waits for the device."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from arachnec.ir.nodes import Instruction
from arachnec.ir.values import Attributes
from arachnec.model_state.cells.flat_layer import FlatLayer, FlatLayout, layouts_of
from arachnec.model_state.cells.gathering import Gathering, Slots
from arachnec.model_state.cells.host_shard import HostShard
from arachnec.runtime.device_runtime import DeviceRuntime
from arachnec.runtime.host_copies import HostCopies, HostInputs
from tests.distributed import fake_device
from tests.distributed.harness import PRELOAD, RankPool
from tests.warm_python import warm_python

BLOCKS, WIDTH = 3, 64
FORWARD = {"gather": (BLOCKS, 0, 1, 2), "release": (0, 1, 2), "held": 2}
BACKWARD = {"gather": (0, 1, 2), "release": (BLOCKS, 0, 1, 2), "scatter": (BLOCKS, 0, 1, 2), "held": 2}


def on_device(model: nn.Module, layout: FlatLayout, slots: Slots, copies: HostCopies) -> FlatLayer:
    """As ``FlatLayer.of``, which swaps tensors: fake ones cannot be."""
    shard = copies.buffer(layout.shard_size, layout.dtype)
    (whole,) = slots.places(layout.layer, BLOCKS, [layout])
    views = {}
    for slot in layout.slots:
        views[slot.name] = nn.Parameter(whole.data[slot.first : slot.first + slot.size].view(slot.shape))
        path, _, name = slot.name.rpartition(".")
        model.get_submodule(path)._parameters[name] = views[slot.name]
    return FlatLayer(layout, shard, whole, views, {}, host=HostShard(copies))


def two_cascades() -> tuple[list[str], tuple[int, int], int]:
    """Waits of two cascades one behind the other, the bytes that crossed, and those of all parameters."""
    device = fake_device.register(0, 1)
    runtime = DeviceRuntime.of(device.device)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)))
    layers = {name: (int(name[0]) - 1) % (BLOCKS + 1) for name, _ in model.named_parameters()}
    sizes = sum(value.numel() * value.itemsize for value in model.parameters())
    with device.used():
        copies = HostCopies(runtime)
        parameters = dict(model.named_parameters())
        flats: dict[int, list[FlatLayer]] = {}
        layouts = layouts_of(parameters, layers, 1)
        slots = Slots.of([(layouts, BLOCKS)], device.device)
        for layout in layouts:
            flats.setdefault(layout.layer, []).append(on_device(model, layout, slots, copies))
        gathering = Gathering(flats, {number: model[number + 1] for number in range(BLOCKS)}, None, slots)
        inputs = HostInputs(copies)
        forward, backward = (
            Instruction(op, "c", (0,), Attributes.of(**lists))
            for op, lists in (("forward", FORWARD), ("backward", BACKWARD))
        )
        with device.watched() as waits:
            for _ in range(2):
                inputs.begin()
                x = torch.zeros(4, WIDTH, device=device.device, requires_grad=True)
                with gathering.forward(forward):
                    loss = model(x).sum()
                kept = [inputs.put(torch.zeros(4, WIDTH, device=device.device)) for _ in range(2)]
                copies.settle()
                back: list[Tensor] = [inputs.get(key) for key in reversed(kept)]
                assert all(value.device == device.device for value in back)
                with gathering.backward(backward, "c"):
                    loss.backward()
                copies.settle()
        return [what for _, what in waits.seen], copies.counted(), sizes


def test_cascades_bring_layers_and_take_gradients_back_without_waiting() -> None:
    pool = RankPool(1, program=warm_python(PRELOAD))
    try:
        ((waits, (from_host, to_host), size),) = pool.run(two_cascades)
    finally:
        pool.close()
    assert waits == []
    kept = 2 * 2 * 4 * WIDTH * 4  # inputs: cascades, of each, rows, columns, bytes
    outside = size // (BLOCKS + 1)  # comes once a cascade, the blocks twice; the second brings the gradient so far
    assert from_host == 2 * (2 * size - outside) + size + kept
    assert to_host == 2 * size + kept
