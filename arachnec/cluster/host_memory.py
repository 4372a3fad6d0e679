"""The memory of nodes' hosts, and the links over which devices copy from and to it. In: a cluster. Out: GiB, GB/s."""

from __future__ import annotations

import math

from arachnec.cluster.device_specs import PCIE4
from arachnec.ir.nodes import Cluster, quantity

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
