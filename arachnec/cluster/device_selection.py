"""Which device a rank takes.

Every rank describes the device that it took in a ``DeviceRecord``, for the others to compare with theirs.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    import torch

GIB = 2**30
MASK = "CUDA_VISIBLE_DEVICES"
DRIVER = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True)
class Gpu:
    name: str  # as the driver calls it
    memory: float  # GiB
    uuid: str  # tells two GPUs of a host apart


class DeviceQuery(Protocol):
    """What torch and the host say of the GPUs that are here."""

    def visible(self) -> int:
        """How many torch can use in this process."""
        ...

    def installed(self) -> int:
        """How many the host's driver knows, visible or not; 0 where there is no driver."""
        ...

    def describe(self, index: int) -> Gpu: ...

    def versions(self) -> dict[str, str]:
        """Of what must be equal on all ranks for them to talk to each other."""
        ...


class TorchDevices:
    """The GPUs that torch finds."""

    def visible(self) -> int:
        import torch

        return torch.cuda.device_count()

    def installed(self) -> int:
        return len(list(DRIVER.iterdir())) if DRIVER.is_dir() else 0

    def describe(self, index: int) -> Gpu:
        import torch

        properties = torch.cuda.get_device_properties(index)
        return Gpu(properties.name, properties.total_memory / GIB, str(getattr(properties, "uuid", "")))

    def versions(self) -> dict[str, str]:
        import torch

        by_name = {"torch": str(torch.__version__), "CUDA": str(torch.version.cuda)}
        if torch.cuda.is_available():
            by_name["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        return by_name


class DeviceRecord(msgspec.Struct, frozen=True):
    """The device of one rank. ``index`` counts what is visible to the rank; -1 where it has none of its own."""

    rank: int
    host: str
    kind: str  # "cuda" or "cpu"
    index: int
    name: str
    memory: float  # GiB
    uuid: str
    visible: int
    installed: int
    wanted: int  # ranks on this host
    mask: str | None
    versions: dict[str, str]

    @property
    def missing(self) -> bool:
        return self.kind == "cuda" and self.index < 0


def select_device(cpu: bool, environment: Mapping[str, str], query: DeviceQuery) -> DeviceRecord:
    """The device of this rank.

    With ``cpu`` the CPU. Otherwise the GPU of the local rank, or, where the launcher shows each rank one GPU only, that
    one. The CPU stands in only on a host that has no GPU, or hides them by an empty CUDA_VISIBLE_DEVICES.
    """
    local, wanted = int(environment.get("LOCAL_RANK", "0")), int(environment.get("LOCAL_WORLD_SIZE", "1"))
    rank, mask = int(environment.get("RANK", "0")), environment.get(MASK)
    host, versions = socket.gethostname(), query.versions()
    visible, installed = (0, 0) if cpu else (query.visible(), query.installed())
    if cpu or (not visible and (not installed or mask == "")):
        return DeviceRecord(rank, host, "cpu", -1, "cpu", 0.0, "", visible, installed, wanted, mask, versions)
    index = 0 if visible == 1 else local if local < visible else -1
    gpu = query.describe(index) if 0 <= index < visible else Gpu("", 0.0, "")
    index = index if index < visible else -1
    return DeviceRecord(
        rank, host, "cuda", index, gpu.name, gpu.memory, gpu.uuid, visible, installed, wanted, mask, versions
    )


def use_device(record: DeviceRecord) -> torch.device:
    """The device of a record, made current in this process."""
    import torch

    if record.kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", record.index)
    torch.cuda.set_device(device)
    return device
