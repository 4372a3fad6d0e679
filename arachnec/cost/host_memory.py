"""What host memory adds to a cascade: the bytes that its instructions copy, and the ms that copies take longer.

A forward brings every layer, a backward brings it again and takes its gradients back; where inputs of blocks lie in
the host, too, the forward takes them there and the backward brings them. Both directions of a link, and the cell's
collectives, run beside compute and beside each other. So each layer shows what the slowest of them takes longer than
its compute; the first layers of a pass and the last gradients have nothing to hide behind. All devices of a node are
taken to copy at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from arachnec.analysis.gathers import layers_listed
from arachnec.cluster.device_specs import copy_speed
from arachnec.cost.compute import PASSES
from arachnec.cost.gathering import Gathering
from arachnec.cost.memory import offloaded
from arachnec.ir.host_placement import inputs_in_host, layers_in_host, optimizer_in_host, own_gradient_bytes
from arachnec.ir.nodes import Cascade, Cluster, Instruction, Phase, Stage, integer
from arachnec.ir.parameter_cells import cell_of, layer_sizes
from arachnec.ir.sampling import on_one_side
from arachnec.ir.stage_sizes import (
    block_count,
    element_bytes,
    gradient_element_bytes,
    largest_share,
    recomputed_blocks,
    trained_count,
)
from arachnec.ir.values import Attributes, Quantity

GIB = 2**30


def with_host_copies(
    instructions: Iterable[Instruction], cascades: Mapping[str, Cascade], stages: Mapping[str, Stage]
) -> list[Instruction]:
    """One rank's instructions in order, with what they copy."""
    seen: set[str] = set()  # stages that have gradients on this rank
    with_copies = []
    for instruction in instructions:
        cascade = cascades.get(instruction.target)
        stage = stages.get(instruction.target if cascade is None else cascade.stage)
        if stage is not None and instruction.op in ("forward", "backward", "weight") and cascade is not None:
            instruction = _cascade(instruction, cascade, stage, first=stage.name not in seen)
            if layers_listed(instruction, "scatter"):
                seen.add(stage.name)
        with_copies.append(instruction)
    return with_copies


def step_copies(stage: Stage) -> Attributes:
    """Of an optimizer in host memory beside parameters on the device: gradients out, parameters in."""
    if not optimizer_in_host(stage) or layers_in_host(stage):
        return Attributes()
    own = trained_count(stage) / integer(stage.attrs.get("sharded", 1)) / (cell_of(stage) or 1)
    return Attributes.of(
        from_host=round(own * element_bytes(stage)), to_host=round(own * gradient_element_bytes(stage))
    )


def reduce_copies(stage: Stage, ranks: Sequence[int], size: int) -> Attributes:
    """Of gradients in host memory, so many bytes, that ranks add up: through the device."""
    if not layers_in_host(stage) or len(ranks) < 2:
        return Attributes()
    return Attributes.of(from_host=size, to_host=size)


def _cascade(instruction: Instruction, cascade: Cascade, stage: Stage, *, first: bool) -> Instruction:
    if not layers_in_host(stage):  # inputs come with them
        return instruction
    inputs = inputs_in_host(stage) and cascade.phase is not Phase.WEIGHT
    blocks = recomputed_blocks(cascade.attrs.get("recompute"), stage) if inputs else 0
    kept = round(inputs_kept(cascade, stage) * GIB)
    brought = round(_gathered_bytes(instruction, stage))
    attrs = instruction.attrs
    if instruction.op == "forward":
        taken = kept
        attrs = attrs.updated(offload=tuple(range(blocks)) or None, host=Quantity(kept / GIB, "GiB") if kept else None)
    else:
        gradients = round(own_gradient_bytes(stage)) if layers_listed(instruction, "scatter") else 0
        taken = gradients
        brought += kept + (0 if first else gradients)
        attrs = attrs.updated(reload=tuple(range(blocks)) or None)
    return replace(instruction, attrs=attrs.updated(from_host=brought or None, to_host=taken or None))


def _gathered_bytes(instruction: Instruction, stage: Stage) -> float:
    """Of the shards of the layers that an instruction gathers."""
    sizes = layer_sizes(stage)
    elements = sum(sizes[number].parameters for number in layers_listed(instruction, "gather"))
    return elements * element_bytes(stage) / (cell_of(stage) or 1)


def inputs_kept(cascade: Cascade, stage: Stage) -> float:
    """GiB of blocks' inputs that each rank of a cascade keeps in its host."""
    own = on_one_side(cascade, cascade.side)
    blocks = recomputed_blocks(cascade.attrs.get("recompute"), stage)
    return offloaded(stage, own, largest_share(own, cascade.degree), blocks)


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
