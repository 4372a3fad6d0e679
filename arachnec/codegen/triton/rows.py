"""What a kernel goes over: the rows of each result, the pieces that joins cut them into, and the lanes of a row."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy
from torch import Tensor, fx

from arachnec.codegen.triton.index import Size, Space, Unsupported, exact, finest, tidy
from arachnec.codegen.triton.operations import (
    RESHAPES,
    along_a_symbol,
    inputs_of,
    is_fixed,
    reduced_dims,
    shape_of,
    sums_rows,
    value_of,
)
from arachnec.codegen.triton.places import Place

NOWHERE = -1  # the dimension of a coordinate that a value is reduced over


@dataclass(frozen=True)
class Target:
    """A value that a kernel makes for a piece of its rows: ``node``, to be stored, or added up for ``sum``.

    Row coordinate k is ``steps[k] = (dimension, elements of it)``, has ``sizes[k]`` values and begins at ``starts[k]``;
    ``lanes`` are the dimensions that lie in a row; ``lane`` the coordinate that does, whose size only a run knows.
    """

    node: fx.Node
    sum: fx.Node | None
    steps: tuple[tuple[int, Size], ...]
    sizes: tuple[Size, ...]
    starts: tuple[Size, ...]
    lanes: tuple[int, ...]
    lane: int | None

    @property
    def width(self) -> int:
        shape = shape_of(value_of(self.node))
        return math.prod(shape[dim] for dim in self.lanes)

    @property
    def kept(self) -> tuple[int, ...]:
        """The row coordinates that a sum keeps."""
        gone = reduced_dims(self.sum) if self.sum is not None else ()
        return tuple(k for k, (dim, _) in enumerate(self.steps) if dim not in gone and k != self.lane)

    def place(self, space: Space) -> Place:
        shape = shape_of(value_of(self.node))
        indices = [space.zero] * len(shape)
        for k, ((dim, step), start) in enumerate(zip(self.steps, self.starts, strict=True)):
            if dim != NOWHERE:
                indices[dim] = indices[dim] + (space.coordinate(k) + start) * step
        parts = space.split([shape[dim] for dim in self.lanes]) if self.width > 1 else []
        for dim, at in zip(self.lanes, parts, strict=False):
            indices[dim] = at
        return tuple(indices)

    def cut(self, coordinate: int, position: Size) -> tuple[Target, Target]:
        """The rows before ``position`` of a coordinate, and those from there on."""

        def piece(size: Size, begin: Size) -> Target:
            sizes, starts = list(self.sizes), list(self.starts)
            sizes[coordinate], starts[coordinate] = tidy(size), tidy(starts[coordinate] + begin)
            return replace(self, sizes=tuple(sizes), starts=tuple(starts))

        return piece(position, 0), piece(self.sizes[coordinate] - position, position)


def targets_of(node: fx.Node, total: fx.Node | None, above: Sequence[fx.Node]) -> list[Target]:
    """The ways to lay out the rows of a value that is made of ``above``, the widest row first.

    Dimensions of fixed size are lanes, and, one after the other, rows: captions of 226 tokens are no lanes.
    """
    shape = shape_of(value_of(node))
    symbols = {shape_of(value_of(n.all_input_nodes[0]))[-1] for n in above if along_a_symbol(n)}
    if len(symbols) > 1:
        raise Unsupported("it reduces rows of different widths that only a run knows")
    symbol = next(iter(symbols), None)
    fixed = [dim for dim, size in enumerate(shape) if is_fixed(size) and size != 1]
    least = math.prod(shape[dim] for dim in fixed) if symbol is None else 0
    for reduction in above:
        if reduced_dims(reduction) and not sums_rows(reduction) and symbol is None:
            given = shape_of(value_of(reduction.all_input_nodes[0]))
            least = min(least, math.prod(given[dim] for dim in reduced_dims(reduction)))
    if reduced_dims(node) and symbol is None:
        least = 1
    ways: list[Target] = []
    for demoted in range(len(fixed) + 1):
        lanes = fixed[demoted:] if symbol is None else []
        if ways and (math.prod(shape[dim] for dim in lanes) < least or symbol is not None):
            break
        steps: list[tuple[int, Size]] = []
        sizes: list[Size] = []
        lane = None
        for dim, size in enumerate(shape):
            if dim in lanes or size == 1:
                continue
            if size == symbol and dim == len(shape) - 1:
                lane = len(sizes)
            parts = _factors(size, above)
            for k, part in enumerate(parts):
                steps.append((dim, tidy(math.prod(parts[k + 1 :]))))
                sizes.append(part)
        if symbol is not None and lane is None:
            lane = len(sizes)
            steps.append((NOWHERE, 0))
            sizes.append(symbol)
        starts = (0,) * len(sizes)
        ways.append(Target(node, total, tuple(steps), tuple(sizes), starts, tuple(lanes), lane))
    return ways


def _factors(size: Size, nodes: Sequence[fx.Node]) -> list[Size]:
    """A dimension that other shapes have as neighbouring ones, in their order."""
    if is_fixed(size) or not isinstance(size, sympy.Mul):
        return [size]
    for node in nodes:
        value = node.meta.get("val")
        shape = shape_of(value) if value is not None and hasattr(value, "shape") else ()
        for begin in range(len(shape)):
            product: Size = 1
            for end in range(begin, len(shape)):
                product = tidy(product * shape[end])
                if end > begin and product == size:
                    return [part for part in shape[begin : end + 1] if part != 1]
                if exact(size, product) is None:
                    break
    return [size]


def space_of(targets: Sequence[Target], nodes: Sequence[fx.Node]) -> Space:
    """Coordinates of what ``targets`` have in common: rows, and lanes as fine as ``nodes`` above them ask."""
    sizes, lane = targets[0].sizes, targets[0].lane
    if lane is not None:
        return Space(sizes, len(sizes), 0, lane)
    reduced = [
        math.prod(shape_of(value_of(n.all_input_nodes[0]))[dim] for dim in reduced_dims(n))
        for n in nodes
        if reduced_dims(n) and not sums_rows(n)
    ]
    width = max(target.width for target in targets)
    if any(target.width not in (1, width) for target in targets):
        raise Unsupported("its results have rows of different sizes")
    if width == 1:
        width = max(reduced, default=1)
    lanes = _lanes(nodes, width)
    least = min((size for size in reduced if size > 1), default=width)
    inner = next((k for k in range(len(lanes) + 1) if math.prod(lanes[len(lanes) - k :]) == least), len(lanes))
    return Space((*sizes, *lanes), len(sizes), inner)


def _lanes(nodes: Sequence[fx.Node], width: int) -> tuple[int, ...]:
    """The parts of a row: all that shapes of whole rows ask for, and of what views of parts ask for what divides."""
    tilings: list[tuple[int, ...]] = [(width,)]
    parts: list[tuple[int, ...]] = []
    views = {x for node in nodes if node.target in RESHAPES for x in (node, *inputs_of(node))}
    for node in nodes:
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            fixed = [size for size in shape_of(value) if is_fixed(size)]
            if math.prod(fixed) >= width:
                tilings.append(_within(fixed, width))
            elif node in views:
                parts.append(_within(fixed, width))
    lanes = finest(tilings)
    for part in parts:
        with contextlib.suppress(Unsupported):
            lanes = finest([lanes, part])
    return lanes


def _within(fixed: Sequence[int], width: int) -> tuple[int, ...]:
    """The last dimensions, as many as fit a row."""
    inside: list[int] = []
    for size in reversed(fixed):
        if math.prod(inside) * size > width:
            break
        inside.insert(0, size)
    return tuple(inside)
