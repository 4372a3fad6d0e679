"""What gathering a stage's parameters adds to a cascade, where they are dealt out over cells.

A forward gathers every layer, a backward gathers it again and reduce-scatters its gradients: an all-gather moves
(k-1)/k of a layer's bytes over the links of a cell of k, a reduce-scatter as much of its gradients'. While a layer
computes, the next one is gathered and the gradients of the one before are on their way. So each layer shows what its
compute does not cover; the first gathers of a pass and the last reduce-scatters have nothing to hide behind.

CPU ranks of a node copy and add up with the cores that compute: what a core does for a gather it does not compute. So
a layer shows at least what compute beside its collectives was measured to take longer; a profile that does not know it,
or a device spec, lets all of it show.

Of a pipeline's stage the last layer does not stay from a forward to its backward, and where the backward is split its
second half reduce-scatters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace

from arachnec.cluster.topology import Link, group_link, moves_by_cores, penalty
from arachnec.cost.communication import collective_time
from arachnec.cost.compute import PASSES
from arachnec.cost.profile import GATHER, OVERLAPPED, SCATTER
from arachnec.ir.nodes import Cascade, Cluster, Phase, Stage, quantity
from arachnec.ir.parameter_cells import cell_of, layer_sizes, own_cell
from arachnec.ir.stage_sizes import block_count, element_bytes, gradient_element_bytes


@dataclass(frozen=True)
class LayerTimes:
    """ms of the collectives of a stage's layers, the mean over blocks; the last layer by itself."""

    gather: float
    scatter: float
    last_gather: float
    last_scatter: float
    gather_overlapped: float = 0.0  # what a layer's compute takes longer for it, however long it computes
    scatter_overlapped: float = 0.0


@dataclass(frozen=True)
class Gathering:
    """ms that cascades of these stages take longer for gathering, on a cluster."""

    stages: Mapping[str, Stage]
    cluster: Cluster
    split: Set[str] = frozenset()  # cascades of phase backward whose weight gradients are another cascade
    _times: dict[tuple[str, tuple[int, ...]], LayerTimes] = field(default_factory=dict, repr=False, compare=False)

    def exposed(self, cascade: Cascade, forward: float, backward: float, rank: int = 0) -> float:
        """ms on the cell of ``rank``, for a cascade that computes for so many ms; 0 where nothing is dealt out."""
        stage = self.stages[cascade.stage]
        if cell_of(stage) is None:
            return 0.0
        times, (forwards, backwards) = self.layer_times(stage, rank), PASSES[cascade.phase]
        count = block_count(stage)
        between = count - 1
        total = 0.0
        if forwards:
            shown = max(times.gather_overlapped, times.gather - forward / count)
            total += times.last_gather + times.gather + between * shown
        if cascade.phase is Phase.BACKWARD:
            total += times.last_gather
        gathers = float(bool(backwards))
        scatters = float(cascade.name not in self.split) if backwards else float(cascade.phase is Phase.WEIGHT)
        moved = gathers * times.gather + scatters * times.scatter
        overlapped = gathers * times.gather_overlapped + scatters * times.scatter_overlapped
        shown = max(overlapped, moved - backward / count)
        return total + moved + between * shown + scatters * times.last_scatter

    def layer_times(self, stage: Stage, rank: int = 0) -> LayerTimes:
        """ms of the collectives of one layer in the cell of ``rank``."""
        cell = cell_of(stage) or 1
        ranks = own_cell(rank, cell)
        key = stage.name, ranks
        if key not in self._times:
            contention = penalty(self.cluster, ranks)
            gathers, scatters = (measured_link(self.cluster, ranks, op) for op in (GATHER, SCATTER))
            *blocks, last = layer_sizes(stage)
            whole, gradient = element_bytes(stage), gradient_element_bytes(stage)
            count = max(1, len(blocks))

            def ms(link: Link, elements: float, size: float) -> float:
                return collective_time(link, elements * size, cell, 1, contention) if elements else 0.0

            block = sum(layer.parameters for layer in blocks) / count
            trained = sum(layer.trained for layer in blocks) / count
            times = LayerTimes(
                ms(gathers, block, whole),
                ms(scatters, trained, gradient),
                ms(gathers, last.parameters, whole),
                ms(scatters, last.trained, gradient),
            )
            if moves_by_cores(self.cluster, ranks):
                gathers = measured_link(self.cluster, ranks, OVERLAPPED[GATHER], gathers)
                scatters = measured_link(self.cluster, ranks, OVERLAPPED[SCATTER], scatters)
                overlapped = ms(gathers, block, whole), ms(scatters, trained, gradient)
                times = replace(times, gather_overlapped=overlapped[0], scatter_overlapped=overlapped[1])
            self._times[key] = times
        return self._times[key]


def measured_link(cluster: Cluster, ranks: tuple[int, ...], op: str, unmeasured: Link | None = None) -> Link:
    """The links of a cell for one kind of collective: within a machine as it was measured, where it was.

    Where it was not, ``unmeasured``, or the links as the cluster has them.
    """
    link, known = group_link(cluster, ranks), measured_collective(cluster, op)
    if known is None or link.outside:
        return unmeasured or link
    latency, speed = known  # measured on all ranks at once, what they share included
    return replace(link, intra=speed, host=math.inf, latency=latency)


def measured_collective(cluster: Cluster, op: str) -> tuple[float, float] | None:
    """Latency in us and GB/s of one kind of collective within a machine; None where it was not measured."""
    rows = cluster.attrs.get("collectives", ())
    for row in rows if isinstance(rows, tuple) else ():
        assert isinstance(row, tuple)
        name, latency, speed = row
        if name == op:
            return quantity(latency), quantity(speed)
    return None
