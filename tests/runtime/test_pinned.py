"""Values that a device is given from pinned memory, whatever their strides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from arachnec.runtime.device_runtime import DeviceRuntime


def pinned_as_torch_does(value: Tensor) -> Tensor:
    """``Tensor.pin_memory`` takes the strides over and copies, which needs no device here."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value)


@pytest.mark.parametrize("strided", [lambda x: x, lambda x: x[:1].expand(5, 4), lambda x: x.t(), lambda x: x[::2, 1:]])
def test_a_tensor_of_any_strides_can_be_pinned(
    strided: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tensor, "pin_memory", pinned_as_torch_does)
    runtime = DeviceRuntime.of(torch.device("cpu"))
    runtime = replace(runtime, capabilities=replace(runtime.capabilities, pinned_memory=True))
    value = strided(torch.arange(20.0).view(5, 4))
    assert torch.equal(runtime.pinned(value), value)
