"""Cells: ranks that hold a stage's parameters, gradients and optimizer state together, each a shard of every layer.

In: a stage with ``cell = k`` and its ``layers``. Out: which ranks make a cell, and how large layers are. The layers of
a stage are numbered as they run. One more, the last number, holds what lies in none of them, or in several.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from arachnec.ir.nodes import Stage, integer
from arachnec.ir.stage_sizes import count_in, element_bytes, gradient_element_bytes, layers_of, own_trained
from arachnec.ir.state_placement import gathered_bytes, gathered_elements

Ranks = tuple[int, ...]
HELD = 2  # layers that are whole at once: the one that computes, and the one that is gathered meanwhile
GIB = 2**30


@dataclass(frozen=True)
class LayerSize:
    """Parameters of one layer, and how many of them train."""

    parameters: float
    trained: float


def cell_of(stage: Stage) -> int | None:
    """Ranks of a cell; None where the stage is whole on every rank."""
    value = stage.attrs.get("cell")
    return value if isinstance(value, int) else None


def cell_fits(cell: int, nodes: int, gpus: int) -> bool:
    """Whether cells of this size divide the world, each inside a machine or of whole machines."""
    return cell >= 1 and (gpus % cell == 0 or (cell % gpus == 0 and nodes * gpus % cell == 0))


def own_cell(rank: int, cell: int) -> Ranks:
    """The cell that a rank is in."""
    first = rank - rank % cell
    return tuple(range(first, first + cell))


@lru_cache(maxsize=256)
def replicas(rank: int, cell: int, ranks: Ranks) -> Ranks:
    """Those of ``ranks``, which are whole cells, that hold the same shard as this one: one in each cell."""
    return tuple(other for other in ranks if other % cell == rank % cell)


def whole_cells(ranks: Ranks, cell: int) -> bool:
    """Whether these ranks are whole cells, one behind the other."""
    runs = [ranks[first : first + cell] for first in range(0, len(ranks), cell)]
    return bool(ranks) and all(run == own_cell(run[0], cell) for run in runs)


def side_by_side(ranks: Ranks, side: int) -> tuple[Ranks, ...]:
    """The ranks of each of the clips that run side by side."""
    width = len(ranks) // side
    return tuple(ranks[first : first + width] for first in range(0, len(ranks), width))


def last_layer(stage: Stage) -> int:
    """The number of the layer that holds what lies in no block."""
    return len(layers_of(stage))


@lru_cache(maxsize=1024)
def layer_sizes(stage: Stage) -> tuple[LayerSize, ...]:
    """Every layer's size, the last one's too. Without `layer_params` frozen ones count as evenly in blocks."""
    if "tensors" in stage.attrs:
        return tuple(LayerSize(*counts) for counts in gathered_elements(stage))
    blocks = layers_of(stage)
    trained = own_trained(stage)
    counted = stage.attrs.get("layer_params")
    if isinstance(counted, tuple) and len(counted) == len(blocks):
        whole = [LayerSize(integer(count), train) for count, (_, train) in zip(counted, blocks, strict=True)]
        outside = trained - sum(layer.trained for layer in whole)
        rest = count_in(stage, "params") - sum(layer.parameters for layer in whole)
        return (*whole, LayerSize(max(0, rest), max(0, outside)))
    frozen = max(0, count_in(stage, "params") - trained) / (len(blocks) or 1)
    sizes = [LayerSize(count + frozen, count) for _, count in blocks]
    outside = max(0, trained - sum(count for _, count in blocks))
    return (*sizes, LayerSize(outside + (0 if blocks else frozen), outside))


def updated_layers(stage: Stage) -> tuple[int, ...]:
    """The layers with parameters that train, in the order in which a forward reads them: the last one first."""
    sizes, last = layer_sizes(stage), last_layer(stage)
    shared = "tied" in stage.attrs  # with other stages, and in no layer of this one
    return tuple(number for number in (last, *range(last)) if sizes[number].trained or (shared and number == last))


def gathered_gib(stage: Stage, held: int = HELD) -> float:
    """GiB on a rank while a cascade runs: gathered layers, and gradients that are not reduce-scattered yet.

    ``held`` times the largest layer, the gradients of two (one in the making, one on its way), and the last layer.
    """
    if cell_of(stage) is None:
        return 0.0
    return whole_gib(stage, held) + scattered_gib(stage)


@lru_cache(maxsize=1024)
def whole_gib(stage: Stage, held: int = HELD) -> float:
    """GiB of that while no backward runs: ``held`` times the largest layer, and the last layer."""
    if cell_of(stage) is None:
        return 0.0
    if sizes := gathered_bytes(stage):
        *layers, outside = (parameters for parameters, _ in sizes)
        return (held * max(layers, default=0) + outside) / GIB
    *blocks, last = layer_sizes(stage)
    largest = max((layer.parameters for layer in blocks), default=0.0)
    return (held * largest + last.parameters) * element_bytes(stage) / GIB


@lru_cache(maxsize=1024)
def scattered_gib(stage: Stage) -> float:
    """GiB of the gradients that are not reduce-scattered yet: of the last layer, and of two others."""
    if cell_of(stage) is None:
        return 0.0
    if sizes := gathered_bytes(stage):
        *layers, outside = (gradients for _, gradients in sizes)
        return (2 * max(layers, default=0) + outside) / GIB
    *blocks, last = layer_sizes(stage)
    trained = max((layer.trained for layer in blocks), default=0.0)
    return (2 * trained + last.trained) * gradient_element_bytes(stage) / GIB
