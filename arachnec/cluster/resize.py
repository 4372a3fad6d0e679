"""The same machines with another number of ranks. In: a cluster. Out: one that a plan can be made for, or a message."""

from __future__ import annotations

from dataclasses import replace

from arachnec.cluster.topology import mix_of
from arachnec.ir.diagnostic import counted, user_error
from arachnec.ir.nodes import Cluster


def cluster_for(cluster: Cluster, world: int) -> Cluster:
    """The same machines with ``world`` ranks. Raises ``UserError`` where they cannot be divided so."""
    if world == cluster.world:
        return cluster
    if world <= cluster.gpus:
        changed = cluster.attrs.updated(nodes=1, gpus=world, nics=_first(cluster, world), mixed=mix_of(cluster, 1))
        return replace(cluster, attrs=changed)
    if world % cluster.gpus:
        raise user_error(
            f"the plan is for {counted(cluster.world, 'rank')} and cannot be made again for {world}",
            help=(
                f"give at most {counted(cluster.gpus, 'rank')}, or a multiple of {cluster.gpus}, or compile for "
                "another cluster"
            ),
        )
    nodes = world // cluster.gpus
    return replace(cluster, attrs=cluster.attrs.updated(nodes=nodes, mixed=mix_of(cluster, nodes)))


def _first(cluster: Cluster, count: int) -> str | None:
    nics = cluster.attrs.get("nics")
    return nics[:count] if isinstance(nics, str) else None
