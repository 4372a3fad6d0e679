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

from arachnec.models.pretrained_on_meta import CLASSES, pretrained_without_weights

MODULE, LAYER, MOVE = "peft.tuners.tuners_utils", "BaseTunerLayer", "_move_adapter_to_device_of_base_layer"

R = TypeVar("R")


def built_by_libraries(build: Callable[[], R]) -> R:
    """What ``build`` gives, its adapters cast, on the meta device without reading weights. It runs again where it has
    imported one of the libraries itself, on the meta device."""
    libraries = (MODULE, *CLASSES)
    before = [name for name in libraries if name in sys.modules]
    failed: Exception | None = None
    try:
        with _casting(), pretrained_without_weights():
            built = build()
    except Exception as error:
        failed = error
    imported = before != [name for name in libraries if name in sys.modules]
    if imported and sys.modules["torch"].get_default_device().type == "meta":
        with _casting(), pretrained_without_weights():
            return build()
    if failed is not None:
        raise failed
    return built


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
