"""What host memory adds to a cascade: layers and inputs of blocks that come and go over the devices' links to hosts.

A forward brings every layer, a backward brings it again and takes its gradients back; where inputs of blocks lie in
the host, too, the forward takes them there and the backward brings them. Both directions of a link, and the cell's
collectives, run beside compute and beside each other. So each layer shows what the slowest of them takes longer than
its compute; the first layers of a pass and the last gradients have nothing to hide behind. All devices of a node are
taken to copy at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from arachnec.cluster.device_specs import copy_speed
from arachnec.cost.compute import PASSES
from arachnec.cost.gathering import Gathering
from arachnec.ir.host_placement import layers_in_host
from arachnec.ir.nodes import Cascade, Cluster, Phase, Stage
from arachnec.ir.parameter_cells import cell_of, layer_sizes
from arachnec.ir.stage_sizes import block_count, element_bytes, gradient_element_bytes

GIB = 2**30


@dataclass(frozen=True)
class HostTransfers:
    """ms that cascades of these stages take longer, gathers in cells included."""

    stages: Mapping[str, Stage]
    cluster: Cluster
    gathering: Gathering

    def exposed(self, cascade: Cascade, forward: float, backward: float, inputs: float, rank: int = 0) -> float:
        """ms for a cascade that computes for so many ms and keeps ``inputs`` GiB of blocks' inputs in its host."""
        stage = self.stages[cascade.stage]
        if not layers_in_host(stage):
            return self.gathering.exposed(cascade, forward, backward, rank)
        forwards, backwards = PASSES[cascade.phase]
        count = block_count(stage)
        cell = cell_of(stage) or 1
        links = self.gathering.layer_times(stage, rank)
        *blocks, last = layer_sizes(stage)
        whole, gradient = element_bytes(stage) / cell, gradient_element_bytes(stage) / cell
        brought = self.ms(sum(layer.parameters for layer in blocks) * whole) / count
        taken = self.ms(sum(layer.trained for layer in blocks) * gradient) / count
        first = self.ms(last.parameters * whole) + links.last_gather
        moved = self.ms(inputs * GIB) / count
        between = count - 1
        total = 0.0
        if forwards:
            shown = max(0.0, max(brought, moved, links.gather) - forward / count)
            total += first + brought + links.gather + between * shown
        scatters = backwards and cascade.name not in self.gathering.split
        if backwards or cascade.phase is Phase.WEIGHT:
            comes, gathers = (brought + moved, links.gather) if backwards else (0.0, 0.0)
            gone, scattered = (taken, links.scatter) if scatters or not backwards else (0.0, 0.0)
            # from the second backward of a rank on, the gradient so far comes, too
            busiest = max(comes + gone, gathers + scattered)
            total += comes + gathers + between * max(0.0, busiest - backward / count)
            if cascade.phase is Phase.BACKWARD:  # the last layer did not stay
                total += first
            if scattered or gone:
                total += scattered + gone + links.last_scatter + self.ms(last.trained * gradient)
        return total

    def ms(self, size: float) -> float:
        """Of so many bytes from or to the host, while the other devices of the node copy as well."""
        return size / (copy_speed(self.cluster) * 1e6)
