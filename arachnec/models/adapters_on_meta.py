"""Adapters of a model that is built on the meta device have the precision that they have on any other.

peft moves a new adapter to the device and the precision of its layer, but leaves one that lies on the meta device as it
is, in float32. A model in bf16 would be planned, and built by every rank that receives its weights, with other tensors
than where it is made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

MODULE, LAYER, MOVE = "peft.tuners.tuners_utils", "BaseTunerLayer", "_move_adapter_to_device_of_base_layer"

R = TypeVar("R")


def with_adapters_cast(build: Callable[[], R]) -> R:
    """What ``build`` gives, its adapters cast. It runs again where it has imported peft itself, on the meta device."""
    known = MODULE in sys.modules
    with _casting():
        built = build()
    if known or MODULE not in sys.modules or sys.modules["torch"].get_default_device().type != "meta":
        return built
    with _casting():
        return build()


@contextmanager
def _casting() -> Iterator[None]:
    layers = getattr(sys.modules.get(MODULE), LAYER, None)
    move = getattr(layers, MOVE, None)
    if move is None:
        yield
        return

    def move_and_cast(layer: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        move(layer, adapter_name, *args, **kwargs)
        _cast(layer, adapter_name)

    setattr(layers, MOVE, move_and_cast)
    try:
        yield
    finally:
        setattr(layers, MOVE, move)


def _cast(layer: Any, adapter_name: str) -> None:
    import torch  # commands that build nothing do without
    from torch import nn

    precision = next((own.dtype for own in layer.get_base_layer().parameters() if own.is_floating_point()), None)
    for name in (*layer.adapter_layer_names, *layer.other_param_names):
        adapters = getattr(layer, name, None)
        if not isinstance(adapters, nn.ModuleDict | nn.ParameterDict) or adapter_name not in adapters:
            continue
        adapter: Any = adapters[adapter_name]
        values = [adapter] if isinstance(adapter, torch.Tensor) else [*adapter.parameters()]
        if values and all(value.device.type == "meta" and value.is_floating_point() for value in values):
            adapters[adapter_name] = adapter.to(precision)
