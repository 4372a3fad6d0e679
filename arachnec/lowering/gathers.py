"""What a forward or backward gathers and releases, where its stage's parameters are dealt out over cells.

The last layer, of what lies in no block, is the first to be gathered and stays until the backward has ended. Blocks
come in the order in which they run. A backward's lists say the same order and are read from the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

from arachnec.ir.host_placement import HOST, layers_in_host
from arachnec.ir.nodes import Instruction, Stage
from arachnec.ir.parameter_cells import HELD, cell_of, last_layer, layer_sizes, own_cell
from arachnec.ir.values import Attributes


def on_rank(instructions: Iterable[Instruction], stage: Stage, rank: int) -> Iterator[Instruction]:
    """A cascade's instructions as they stand in the program of one of its ranks."""
    cell, place = cell_of(stage), HOST if layers_in_host(stage) else None
    for instruction in instructions:
        if cell is not None and instruction.op in ("forward", "backward"):
            yield _gathering(instruction, stage, own_cell(rank, cell), place)
        else:
            yield instruction


@lru_cache(maxsize=4096)  # the members of a cell have the same line
def _gathering(instruction: Instruction, stage: Stage, cell: tuple[int, ...], place: str | None) -> Instruction:
    last = last_layer(stage)
    blocks, every = tuple(range(last)), (last, *range(last))
    trained = tuple(number for number in every if layer_sizes(stage)[number].trained)
    if instruction.op == "forward":
        lists = Attributes.of(cell=cell, gather=every, release=blocks, held=HELD)
    else:
        lists = Attributes.of(cell=cell, gather=blocks, scatter=trained, release=every, held=HELD)
    return replace(instruction, attrs=instruction.attrs.updated(**dict(lists.pairs), place=place))
