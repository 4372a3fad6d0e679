"""What is known of devices and hosts before anybody has measured them: specifications, and how much of them lasts.

The specified peak is never reached. ``efficiency`` is the part of it that a video transformer sustains, and ``source``
says where that number is from: derived from a published run, or an assumption. ``arachnec profile`` replaces all of
this by measurements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from arachnec.ir.nodes import Cluster, quantity


@dataclass(frozen=True)
class DeviceSpecs:
    """One device, and the links of a usual server with such devices: per device, in one direction."""

    name: str
    peak: float  # TFLOP/s, dense bf16
    efficiency: float  # sustained / peak
    source: str  # of the efficiency
    memory: float  # GiB that a program gets, a little less than the vendor's GB
    bandwidth: float  # GB/s of its own memory
    intra: float  # GB/s to another device of the node
    inter: float  # GB/s to a device of another node
    latency: float  # us, within a node
    inter_latency: float  # us, between nodes
    block_overhead: float  # ms that one forward of one transformer block takes however small it is
    host: float = math.inf  # GB/s that the devices of a node share, where they have no links of their own
    nics: str | None = None  # NIC of each device of a node of eight
    compute: tuple[int, int] = (0, 0)  # CUDA's compute capability; (0, 0) without CUDA

    @property
    def sustained(self) -> float:
        """TFLOP/s."""
        return self.peak * self.efficiency

    @property
    def pcie(self) -> float:
        """GB/s from and to the host's memory, each way: PCIe 5.0 since compute capability 9.0."""
        return 2 * PCIE4 if self.compute >= (9, 0) else PCIE4


# HunyuanVideo, 720p, 129 frames, 50 steps, one device: 1904 s (H100), 6639 s (H20), 6044 s (L20) in xDiT's table.
_XDIT = "derived from xDiT's HunyuanVideo times on one device"
# benchmarks/results/gpu_acceptance_nvidia_h200.json: forward and backward of 32,760 tokens, 28.3 TFLOP, in 67.7 ms; a
# forward of 256 tokens in 2.1 ms, which is the host's time. That host was a virtual machine; profile others.
_BLOCK = "measured: training of a block of Wan2.1-1.3B"
_ASSUMED = "assumption"
_NICS = "AABBCCDD"
# GB/s of PCIe 4.0 x16: 16 lanes of 16 GT/s with 128b/130b coding, less about a fifth for headers and flow control.
# Without NVLink and peer-to-peer, what devices send each other goes up one switch's port into the host and down again.
PCIE4 = 25

BLOCK_OVERHEAD = 0.15  # ms

DEVICE_SPECS = {
    specs.name: specs
    for specs in (
        DeviceSpecs("h100-80g", 989, 0.32, _XDIT, 79, 3350, 450, 50, 10, 20, 0.15, nics=_NICS, compute=(9, 0)),
        DeviceSpecs("h200-141g", 989, 0.42, _BLOCK, 139, 4800, 450, 50, 10, 20, 2.1, nics=_NICS, compute=(9, 0)),
        DeviceSpecs("a100-80g", 312, 0.50, _ASSUMED, 79, 2000, 300, 25, 10, 20, 0.15, nics=_NICS, compute=(8, 0)),
        DeviceSpecs("h20-96g", 148, 0.61, _XDIT, 95, 4000, 450, 50, 10, 20, 0.15, nics=_NICS, compute=(9, 0)),
        DeviceSpecs("l20-48g", 119.5, 0.84, _XDIT, 44, 864, PCIE4, 25, 15, 25, 0.15, host=PCIE4, compute=(8, 9)),
        DeviceSpecs("cpu", 0.1, 0.30, _ASSUMED + ": a core a rank, fp32", 8, 8, 1, 0.1, 100, 300, 0.5),
    )
}

ALIASES = {"h100": "h100-80g", "h200": "h200-141g", "a100": "a100-80g", "h20": "h20-96g", "l20": "l20-48g"}


def find_device_specs(name: str) -> DeviceSpecs | None:
    """The specs of a device by its full or short name, in either case; None where it is not known."""
    lowered = name.lower()
    return DEVICE_SPECS.get(ALIASES.get(lowered, lowered))


def block_overhead_of(cluster: Cluster) -> float:
    """ms that one forward of one block takes on the cluster's device however small it is; where the device is unknown,
    as on most of those that are known."""
    specs = find_device_specs(str(cluster.attrs.get("device")))
    return specs.block_overhead if specs else BLOCK_OVERHEAD


FREE = 0.1  # of a host's memory that stays free: the system, loaders, encoders' outputs
# GB/s of a node's memory to its processors, for the optimizer there. That of a rank of 16 cores is derived from a step
# beside an H200 (docs/host_memory.md), that of a whole node assumed.
UPDATE_BANDWIDTH, NODE_UPDATE_BANDWIDTH = 24.0, 100.0


def usable_host_memory(cluster: Cluster) -> float:
    """GiB of a node's host that its devices may fill together; 0 where the cluster says none."""
    stated = cluster.attrs.get("host_memory")
    return 0.0 if stated is None else (1 - FREE) * quantity(stated)


def stated_for(gib: float) -> float:
    """Whole GiB of ``host_memory`` of which so many are usable."""
    return float(math.ceil(gib / (1 - FREE)))


def device_copy_speed(cluster: Cluster) -> float:
    """GB/s of one device's own link to its host, one direction."""
    stated = cluster.attrs.get("pcie")
    return PCIE4 if stated is None else quantity(stated)


def node_copy_speed(cluster: Cluster) -> float:
    """GB/s of all devices of a node together: what they share where it is known, else a switch for every two."""
    shared = cluster.attrs.get("host")
    if shared is not None:
        return quantity(shared)
    return device_copy_speed(cluster) * math.ceil(cluster.gpus / 2)


def update_bandwidth(cluster: Cluster) -> float:
    """GB/s of the processors of a node, all of whose ranks update at once."""
    return min(NODE_UPDATE_BANDWIDTH, UPDATE_BANDWIDTH * cluster.gpus)


def copy_speed(cluster: Cluster) -> float:
    """GB/s of a device while all others of its node copy, too; one direction."""
    return min(device_copy_speed(cluster), node_copy_speed(cluster) / cluster.gpus)
