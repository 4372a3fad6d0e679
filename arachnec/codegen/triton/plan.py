"""Which kernels a graph takes: one for results with their rows in common, more for pieces of joins and after sums.

A sum over rows is known when all programs are done, so what reads it is made by kernels after it. Rows that a join
puts together are written in place by a kernel for each part. A few vectors that are made of sums alone are left to
plain operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from arachnec.codegen.triton.index import Cut, Unsupported
from arachnec.codegen.triton.kernel import ColumnSum, Launcher, Sizes
from arachnec.codegen.triton.operations import (
    aten,
    inputs_of,
    is_fixed,
    needed,
    reduced_dims,
    shape_of,
    sums_rows,
    value_of,
)
from arachnec.codegen.triton.rows import Target, targets_of
from arachnec.codegen.triton.text import TooWide, tiles_for, write_source

PIECES = 64  # of one result's rows


@dataclass(frozen=True, eq=False)
class Stage:
    """Forward or backward: ``launchers`` write ``stores`` and add up ``sums``, in order; ``tail`` makes the outputs."""

    placeholders: tuple[fx.Node, ...]
    sizes: Sizes
    stores: tuple[tuple[fx.Node, tuple[int, ...], tuple[int, ...]], ...]
    launchers: tuple[Launcher, ...]
    sums: tuple[tuple[ColumnSum, int], ...]  # each after so many launchers
    tail: fx.GraphModule
    outputs: tuple[fx.Node, ...]

    def __call__(self, values: Sequence[Any]) -> tuple[Any, ...]:
        numbers = self.sizes.of(values)
        known: dict[fx.Node, Any] = dict(zip(self.placeholders, values, strict=False))
        device = next(value.device for value in values if isinstance(value, Tensor))
        for node, shape, order in self.stores:
            known[node] = _empty([numbers[p] for p in shape], order, value_of(node).dtype, device)
        parts: dict[fx.Node, list[Tensor]] = {}
        waiting = list(self.sums)
        for count, launcher in enumerate(self.launchers, 1):
            stores = [known[target.node] for target in launcher.stores]
            totals = launcher([known[node] for node in launcher.reads], stores, numbers)
            for target, part in zip(launcher.sums, totals, strict=True):
                assert target.sum is not None
                parts.setdefault(target.sum, []).append(part)
            while waiting and waiting[0][1] == count:
                total, _ = waiting.pop(0)
                known[total.node] = total(parts[total.node], numbers)
        return tuple(self.tail(*values, *(known[node] for node in self.outputs)))


def _empty(shape: Sequence[int], order: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor that lies in memory in the order of dimensions that the graph gave it."""
    dense = torch.empty([shape[dim] for dim in order], dtype=dtype, device=device)
    return dense.permute([order.index(dim) for dim in range(len(shape))])


def stage_of(graph_module: fx.GraphModule, name: str) -> Stage:
    """The kernels of a graph. Raises ``Unsupported``."""
    try:
        return _stage(graph_module.graph, name, materialised=False)
    except TooWide:
        return _stage(graph_module.graph, name, materialised=True)
    except Cut as cut:
        raise Unsupported(f"its results are cut at different rows: {cut}") from cut


def _stage(graph: fx.Graph, name: str, *, materialised: bool) -> Stage:
    results: list[fx.Node | None] = list(graph.output_node().args[0])  # type: ignore[arg-type]
    wanted = [result for result in results if result is not None and _identity(result) is None]
    above = set(needed(wanted))
    sums = [node for node in graph.nodes if node in above and sums_rows(node)]
    rows = [n for n in graph.nodes if n in above and reduced_dims(n) and not sums_rows(n)] if materialised else []
    ends = frozenset([*sums, *rows])
    level = _levels(graph, ends)
    stores, tail_nodes = _split(graph, results, wanted, sums)
    stores = list(dict.fromkeys([*rows, *stores]))
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    sizes = Sizes(placeholders)

    def before(node: fx.Node) -> int:
        return max((level[x] for x in inputs_of(node)), default=0)

    wholes = [(before(node), node, node, None) for node in stores if node in ends]
    wholes += [(level[node], node, node, None) for node in stores if node not in ends]
    wholes += [(before(node), node.all_input_nodes[0], node, node) for node in sums]
    pieces: list[tuple[int, Target]] = []
    for at, value, end, total in wholes:
        pieces += [(at, target) for target in _pieces(value, total, ends - {end})]
    launchers = [launcher for at in sorted({at for at, _ in pieces}) for launcher in _launchers(
        [target for other, target in pieces if other == at], ends, sizes, name)]  # fmt: skip
    last: dict[fx.Node, int] = {}
    by_sum: dict[fx.Node, list[Target]] = {}
    for count, launcher in enumerate(launchers, 1):
        for target in launcher.sums:
            assert target.sum is not None
            last[target.sum] = count
            by_sum.setdefault(target.sum, []).append(target)
    totals = sorted(
        ((ColumnSum(targets, sizes), last[node]) for node, targets in by_sum.items()), key=lambda pair: pair[1]
    )
    laid = tuple((n, tuple(sizes.position(s) for s in shape_of(value_of(n))), _order(value_of(n))) for n in stores)
    kept = tuple(dict.fromkeys([*stores, *sums]))
    tail = _tail(graph, results, kept, tail_nodes)
    return Stage(tuple(placeholders), sizes, laid, tuple(launchers), tuple(totals), tail, kept)


def _levels(graph: fx.Graph, ends: frozenset[fx.Node]) -> dict[fx.Node, int]:
    """How many kernels have to be done one after the other before a value can be read."""
    level: dict[fx.Node, int] = {}
    for node in graph.nodes:
        level[node] = max((level[x] for x in inputs_of(node)), default=0) + (node in ends)
    return level


def _split(
    graph: fx.Graph, results: Sequence[fx.Node | None], wanted: Sequence[fx.Node], sums: Sequence[fx.Node]
) -> tuple[list[fx.Node], list[fx.Node]]:
    """The results that kernels store, and the nodes that plain operations make of sums and of inputs."""
    after: set[fx.Node] = set(sums)
    for node in graph.nodes:
        if any(x in after for x in inputs_of(node)):
            after.add(node)
    count = max((_symbols(value_of(node.all_input_nodes[0])) for node in sums), default=0)

    def is_row(node: fx.Node) -> bool:
        value = node.meta.get("val")
        return isinstance(value, Tensor) and _symbols(value) >= count

    stores = [node for node in dict.fromkeys(wanted) if node not in after or (is_row(node) and node not in sums)]
    tail: dict[fx.Node, None] = {}
    front = [node for node in wanted if node not in stores]
    while front:
        node = front.pop()
        if node in tail or node in sums or node in stores or node.op == "placeholder":
            continue
        if is_row(node) and isinstance(node.meta["val"], Tensor) and node not in sums and node.target not in _FREE:
            stores.append(node)
            continue
        tail[node] = None
        front.extend(node.all_input_nodes)
    return stores, list(tail)


_FREE = (aten.full.default, aten.zeros.default, aten.scalar_tensor.default)


def _symbols(value: Tensor) -> int:
    return sum(not is_fixed(size) for size in shape_of(value))


def _pieces(value: fx.Node, total: fx.Node | None, ends: frozenset[fx.Node]) -> list[Target]:
    """A result's rows, in as many pieces as joins cut them into."""
    refused: Unsupported | None = None
    above = [node for node in needed([value], ends) if node not in ends]
    for whole in targets_of(value, total, above):
        targets: list[Target] = []
        front = [whole]
        try:
            while front:
                target = front.pop()
                if len(targets) > PIECES:
                    raise Unsupported("it joins too many parts")
                try:
                    write_source([target], ends, next(iter(tiles_for([target]).values())))
                    targets.append(target)
                except Cut as cut:
                    front += reversed(target.cut(cut.coordinate, cut.position))
            return targets
        except Unsupported as reason:
            refused = reason if refused is None or isinstance(reason, TooWide) else refused
    assert refused is not None
    raise refused


def _launchers(targets: Sequence[Target], ends: frozenset[fx.Node], sizes: Sizes, name: str) -> list[Launcher]:
    """One for all targets with the same rows, where they can be one."""
    groups: list[list[Target]] = []
    for target in targets:
        for group in groups:
            alike = None if _apart(target, group[0], ends) else _alike(target, group)
            if alike is not None and len({t.kept for t in [*group, alike] if t.sum is not None and t.kept}) <= 1:
                group.append(alike)
                break
        else:
            groups.append([target])
    launchers = []
    for group in groups:
        own = ends - {target.node for target in group if target.sum is None}
        try:
            launchers.append(Launcher(group, own, sizes, name))
        except (TooWide, Cut):
            raise
        except Unsupported:
            if len(group) == 1:
                raise
            launchers += [Launcher([target], own, sizes, name) for target in group]
    return launchers


def _apart(target: Target, other: Target, ends: frozenset[fx.Node]) -> bool:
    """Whether one is a reduction that was taken out of a kernel, and the other is not."""
    return (target.sum is None and target.node in ends) != (other.sum is None and other.node in ends)


def _alike(target: Target, group: Sequence[Target]) -> Target | None:
    """``target`` with its coordinates in the order of others', if rows are the same, and as wide or of one value."""
    other, width = group[0], max(launcher.width for launcher in group)
    if (target.lane is None) != (other.lane is None) or (width != 1 and target.width not in (1, width)):
        return None
    if target.sizes == other.sizes and target.lane == other.lane:
        return target
    if len(set(other.sizes)) < len(other.sizes) or sorted(map(str, target.sizes)) != sorted(map(str, other.sizes)):
        return None
    order = [target.sizes.index(size) for size in other.sizes]
    lane = None if target.lane is None else order.index(target.lane)
    if lane != other.lane:
        return None
    return replace(target, steps=tuple(target.steps[k] for k in order), sizes=other.sizes,
                   starts=tuple(target.starts[k] for k in order))  # fmt: skip


def _order(value: Tensor) -> tuple[int, ...]:
    """Dimensions from the outermost in memory to the innermost."""
    strides = [size if isinstance(size, int) else size.node.hint for size in value.stride()]
    return tuple(sorted(range(value.ndim), key=lambda dim: (-strides[dim], dim)))


def _identity(node: fx.Node) -> fx.Node | None:
    """The input that a result is, if it is one."""
    while node.target in (aten.alias.default, aten.detach.default) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node if node.op == "placeholder" else None


def _tail(
    graph: fx.Graph, results: Sequence[fx.Node | None], computed: Sequence[fx.Node], own: Sequence[fx.Node]
) -> fx.GraphModule:
    """Inputs and what the kernels made, to the outputs."""
    tail = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            known[node] = tail.placeholder(node.name)
    for number, node in enumerate(computed):
        known[node] = tail.placeholder(f"made_{number}")
    for node in graph.nodes:
        if node in own:
            known[node] = tail.node_copy(node, known.__getitem__)
    outputs = [None if result is None else known[_identity(result) or result] for result in results]
    tail.output(tuple(outputs))
    return fx.GraphModule(torch.nn.Module(), tail)
