"""What every section of ``gpu_acceptance.py`` is given."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from arachnec.cluster.detect import find_by_driver_name

Row = dict[str, Any]


@dataclass(frozen=True)
class Machine:
    """The devices, the time, and a folder for what a section writes meanwhile."""

    dry: bool  # tiny sizes on the processor: the control flow, and no measurement of anything
    gpus: int  # ranks where it is dry
    end: float  # time.monotonic() after which a section is stopped
    scratch: Path

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def cluster(self, ranks: int) -> str:
        """So many of these devices, in one node."""
        if self.dry:
            return f"{ranks}:cpu"
        name = torch.cuda.get_device_name()
        specs = find_by_driver_name(name)
        if specs is None:
            raise RuntimeError(f"the device is unknown of {name} in arachnec/cluster/device_specs.py")
        return f"1x{ranks}:{specs.name}"

    def synchronize(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def empty_cache(self) -> None:
        if not self.dry:
            torch.cuda.empty_cache()


def verdict(row: Row, name: str, limit: float) -> Row:
    """The row, and whether its value ``name`` is within a limit; not a number is not."""
    return {**row, "limit": limit, "right": bool(row[name] <= limit)}
