"""The end of an iteration: the all-reduce of a stage's gradients, and the optimizer's step."""

from __future__ import annotations

from dataclasses import replace

from arachnec.cluster.device_specs import find_device_specs
from arachnec.cluster.host_memory import UPDATE_BANDWIDTH, copy_speed
from arachnec.cluster.topology import group_link, machines, penalty
from arachnec.cost.communication import collective_time
from arachnec.cost.memory import GIB
from arachnec.ir.host_placement import layers_in_host, optimizer_in_host
from arachnec.ir.nodes import Cluster, Stage, integer, quantity
from arachnec.ir.parameter_cells import cell_of, replicas
from arachnec.ir.stage_sizes import (
    element_bytes,
    gib,
    gradient_bytes,
    gradient_element_bytes,
    trained_bytes,
    trained_count,
)

UPDATED = 28  # bytes that AdamW reads and writes of a parameter: master and moments both, the gradient read
ASSUMED_BANDWIDTH = 1000.0  # GB/s of a device's own memory, where its specs are not known


def reduce_time(cluster: Cluster, stage: Stage, ranks: tuple[int, ...], size: float | None = None) -> float:
    """ms of the all-reduce of a trained stage's gradients over these ranks (ring: 2 (n-1)/n of the bytes).

    Where the optimizer is dealt out it is a reduce-scatter, half of that. Of a stage in cells these are the ranks that
    hold one shard, and its gradients are that shard's. ``size`` is the bytes of a bucket of them; without it they go
    all at once.
    """
    size = gradient_bytes(stage) / (cell_of(stage) or 1) if size is None else size
    if len(ranks) < 2 or not size:
        return 0.0
    link, measured = group_link(cluster, ranks), cluster.attrs.get("all_reduce")
    if measured is not None:
        link = replace(link, intra=quantity(measured))
    summed = ring_passes(stage) * collective_time(link, size, len(ranks), 1, penalty(cluster, ranks))
    # those that lie in host memory are brought, and taken back
    return summed + (2 * size / (copy_speed(cluster) * 1e6) if layers_in_host(stage) else 0.0)


def ring_passes(stage: Stage) -> int:
    """How often a ring carries every byte of the gradients: reduce-scatter, and all-gather where all need them."""
    return 1 if "sharded" in stage.attrs and "cell" not in stage.attrs else 2


def step_time(cluster: Cluster, stage: Stage, ranks: tuple[int, ...] | None = None) -> float:
    """ms of the optimizer, which reads and writes the stage's state once and, dealt out, sends what it updated.

    ``ranks`` are those that it is dealt out over; without them the first of the cluster count.
    """
    specs = [find_device_specs(name) for name in {machine.device for machine in machines(cluster)}]
    bandwidth = min(device.bandwidth if device else ASSUMED_BANDWIDTH for device in specs)
    update = 2 * gib(stage.attrs.get("state")) * GIB / (bandwidth * 1e9) * 1e3
    if "update" in stage.attrs:  # measured with the whole state on every rank
        update = quantity(stage.attrs["update"]) / integer(stage.attrs.get("sharded", 1)) / (cell_of(stage) or 1)
    if optimizer_in_host(stage):
        update = host_update_time(cluster, stage)
    if "sharded" not in stage.attrs:
        return update
    cell = cell_of(stage) or 1
    everyone = replicas(0, cell, cluster.world) if cell > 1 else ranks or tuple(range(integer(stage.attrs["sharded"])))
    link, contention = group_link(cluster, everyone), penalty(cluster, everyone)
    return update + collective_time(link, trained_bytes(stage) / cell, len(everyone), 1, contention)


def host_update_time(cluster: Cluster, stage: Stage) -> float:
    """ms of an optimizer on the hosts' processors, whose memory bounds it; all ranks of a node update at once.

    Gradients that lie on the device are copied out before, and the parameters back in.
    """
    own = trained_count(stage) / integer(stage.attrs.get("sharded", 1)) / (cell_of(stage) or 1)
    update = own * UPDATED * cluster.gpus / (UPDATE_BANDWIDTH * 1e6)
    if layers_in_host(stage):
        return update
    return update + own * (gradient_element_bytes(stage) + element_bytes(stage)) / (copy_speed(cluster) * 1e6)
