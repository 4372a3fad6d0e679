"""Small tables that the host works out, on the device where they are used."""

from __future__ import annotations

import torch
from torch import Tensor


def on_device(table: Tensor, device: torch.device) -> Tensor:
    """From pinned memory, so that the host does not wait for the device."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table.to(device)
