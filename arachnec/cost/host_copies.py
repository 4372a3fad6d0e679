"""What instructions bring from host memory and take there, where something of their stage lies in it.

In: the ranks' instructions. Out: the same, with the blocks whose inputs go and come, the GiB that stay in the host
meanwhile, and the bytes that cross each way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from arachnec.analysis.gathers import layers_listed
from arachnec.cost.memory import offloaded
from arachnec.ir.host_placement import (
    inputs_in_host,
    layers_in_host,
    optimizer_in_host,
    own_gradient_bytes,
)
from arachnec.ir.nodes import Cascade, Instruction, Phase, Stage, integer
from arachnec.ir.parameter_cells import cell_of, layer_sizes
from arachnec.ir.sampling import on_one_side
from arachnec.ir.stage_sizes import (
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
