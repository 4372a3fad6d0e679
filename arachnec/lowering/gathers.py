"""What a forward or backward gathers and releases, where its stage's parameters are dealt out over cells; and what a
rank gathers before all else, where it has updated a part of the parameters only.

The last layer, of what lies in no block, is the first to be gathered and stays until the backward has ended; of a
pipeline's stage until the forward has, because other micro-batches come between the two. Blocks come in the order in
which they run. A backward's lists say the same order and are read from the end. Where a backward is split, its second
half has all gradients of a layer and reduce-scatters them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

from arachnec.cost.model import CostModel
from arachnec.ir.host_placement import HOST, layers_in_host
from arachnec.ir.nodes import Instruction, Module, Phase, Stage
from arachnec.ir.parameter_cells import HELD, cell_of, last_layer, layer_sizes, own_cell, replicas, updated_layers
from arachnec.ir.stage_sizes import element_bytes
from arachnec.ir.values import Attributes, Quantity


def on_rank(
    instructions: Iterable[Instruction], stage: Stage, rank: int, phase: Phase = Phase.TRAIN, *, split: bool = False
) -> Iterator[Instruction]:
    """The instructions of a cascade of a ``phase`` as they stand in the program of one of its ranks.

    ``split`` is a backward that leaves its weight gradients to another cascade.
    """
    cell, place = cell_of(stage), HOST if layers_in_host(stage) else None
    for instruction in instructions:
        if cell is not None and instruction.op in ("forward", "backward", "weight"):
            yield _gathering(instruction, stage, own_cell(rank, cell), place, phase, split)
        else:
            yield instruction


def updated_parameters(module: Module, resident: Mapping[str, frozenset[int]]) -> dict[int, list[Instruction]]:
    """By rank, the gathers with which its program begins: of what other ranks have updated in the step before.

    Layers are gathered in the order in which a forward reads them, of a stage in cells each shard by the ranks that
    hold it. ``resident`` are the ranks of every stage.
    """
    cost = CostModel(module)
    gathers: dict[int, list[Instruction]] = defaultdict(list)
    for stage in module.stages:
        ranks, layers = tuple(sorted(resident[stage.name])), updated_layers(stage)
        if "sharded" not in stage.attrs or len(ranks) < 2 or not layers:
            continue
        cell = cell_of(stage) or 1
        size = round(sum(layer_sizes(stage)[layer].trained for layer in layers) * element_bytes(stage) / cell)
        for equal in [replicas(first, cell, ranks) for first in range(cell)]:
            time = Quantity(cost.gather_time(stage, equal, layers), "ms")
            gather = Instruction("gather", stage.name, equal, Attributes.of(layers=layers, bytes=size, time=time))
            for rank in equal:
                gathers[rank].append(gather)
    return gathers


@lru_cache(maxsize=4096)  # the members of a cell have the same line
def _gathering(
    instruction: Instruction, stage: Stage, cell: tuple[int, ...], place: str | None, phase: Phase, split: bool
) -> Instruction:
    last = last_layer(stage)
    blocks, every = tuple(range(last)), (last, *range(last))
    trained = tuple(number for number in every if layer_sizes(stage)[number].trained)
    if phase is Phase.WEIGHT:
        lists = Attributes.of(cell=cell, scatter=trained)
    elif instruction.op == "forward":
        lists = Attributes.of(cell=cell, gather=every, release=blocks if phase is Phase.TRAIN else every, held=HELD)
    else:
        gathered = blocks if phase is Phase.TRAIN else (*blocks, last)
        scattered = None if split else trained
        lists = Attributes.of(cell=cell, gather=gathered, scatter=scattered, release=every, held=HELD)
    return replace(instruction, attrs=instruction.attrs.updated(**dict(lists.pairs), place=place))
