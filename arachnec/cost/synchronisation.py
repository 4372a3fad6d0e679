"""Between two iterations: a stage's gradients all-reduced, the optimizer's step, what it updated gathered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from arachnec.cluster.device_specs import copy_speed, find_device_specs, update_bandwidth
from arachnec.cluster.topology import group_link, machines, penalty
from arachnec.cost.communication import collective_time
from arachnec.cost.memory import GIB
from arachnec.ir.host_placement import layers_in_host, optimizer_in_host
from arachnec.ir.nodes import Cluster, Stage, integer, quantity
from arachnec.ir.parameter_cells import cell_of, layer_sizes
from arachnec.ir.stage_sizes import element_bytes, gib, gradient_bytes, gradient_element_bytes, trained_count

NORM_BYTES = 8
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


def norm_time(cluster: Cluster, ranks: tuple[int, ...]) -> float:
    """ms of summing one number over these ranks: the squared norm of their gradients."""
    return all_reduce_time(cluster, ranks, NORM_BYTES)


def all_reduce_time(cluster: Cluster, ranks: tuple[int, ...], size: float) -> float:
    """ms of an all-reduce of so many bytes over these ranks, on plain links."""
    if len(ranks) < 2:
        return 0.0
    return 2 * collective_time(group_link(cluster, ranks), size, len(ranks), 1, penalty(cluster, ranks))


def ring_passes(stage: Stage) -> int:
    """How often a ring carries every byte of the gradients: reduce-scatter, and all-gather where all need them."""
    return 1 if "sharded" in stage.attrs and "cell" not in stage.attrs else 2


def gather_time(cluster: Cluster, stage: Stage, ranks: tuple[int, ...], layers: Sequence[int]) -> float:
    """ms of gathering what each of these ranks has updated of these layers, one after another."""
    if len(ranks) < 2:
        return 0.0
    link, contention = group_link(cluster, ranks), penalty(cluster, ranks)
    sizes, cell = layer_sizes(stage), cell_of(stage) or 1
    bytes_of = (sizes[layer].trained * element_bytes(stage) / cell for layer in layers)
    return sum(collective_time(link, size, len(ranks), 1, contention) for size in bytes_of if size)


def step_time(cluster: Cluster, stage: Stage) -> float:
    """ms of the optimizer, which reads and writes the stage's state once."""
    specs = [find_device_specs(name) for name in {machine.device for machine in machines(cluster)}]
    bandwidth = min(device.bandwidth if device else ASSUMED_BANDWIDTH for device in specs)
    if "update" in stage.attrs:  # measured with the whole state on every rank
        return quantity(stage.attrs["update"]) / integer(stage.attrs.get("sharded", 1)) / (cell_of(stage) or 1)
    if optimizer_in_host(stage):
        return host_update_time(cluster, stage)
    return 2 * gib(stage.attrs.get("state")) * GIB / (bandwidth * 1e9) * 1e3


def host_update_time(cluster: Cluster, stage: Stage) -> float:
    """ms of an optimizer on the hosts' processors, whose memory bounds it; all ranks of a node update at once.

    Gradients that lie on the device are copied out before, and the parameters back in.
    """
    own = trained_count(stage) / integer(stage.attrs.get("sharded", 1)) / (cell_of(stage) or 1)
    update = own * UPDATED * cluster.gpus / (update_bandwidth(cluster) * 1e6)
    if layers_in_host(stage):
        return update
    return update + own * (gradient_element_bytes(stage) + element_bytes(stage)) / (copy_speed(cluster) * 1e6)
