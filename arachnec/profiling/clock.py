"""Seconds, when the device has done all that it was given."""

from __future__ import annotations

import time

import torch


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
