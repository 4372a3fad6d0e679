"""Calls of hand-written kernels in the place of the operations that they were matched to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from arachnec.codegen.fused_kernels import KERNELS, Kernel
from arachnec.fusion.fused_graph import rest_of
from arachnec.fusion.graph import FusionGraph
from arachnec.fusion.match import match_region
from arachnec.fusion.walk import Match
from arachnec.ir.nodes import Fused
from arachnec.tracing.captured import CapturedBlock


class KernelCalls:
    """Writes into ``graph``, whose ``nodes`` by name are those of ``known``; ``captured`` are the nodes as traced.

    What is not ``intact`` runs in another form than it was traced in, and is left as it is.
    """

    def __init__(
        self,
        graph: fx.Graph,
        known: FusionGraph,
        captured: Mapping[str, fx.Node],
        nodes: dict[str, fx.Node],
        intact: Set[str],
        learned: Set[fx.Node],
    ) -> None:
        self.graph, self.known, self.captured, self.nodes = graph, known, captured, nodes
        self.intact, self.learned = intact, learned

    def put(self, region: Fused, members: list[fx.Node]) -> list[list[fx.Node]]:
        """What is left of the region's nodes when calls have taken their places: the nodes of each further kernel."""
        if region.attrs.get("kernel") == "generated":
            return [members]
        mask = sum(1 << self.known.index[name] for name in region.ops)
        put = tuple(match for match in match_region(self.known, mask) if self._put(match))
        inside = set(members)
        left = [[self.nodes[name] for name in self._names(part)] for part in rest_of(self.known, mask, put)]
        return [[node for node in part if node in inside] for part in left]

    def _put(self, match: Match) -> bool:
        """Put the call of a kernel in the place of its operations, where it can stand for them."""
        kernel = KERNELS[match.kernel]
        operands = self._operands(match)
        if operands is None or any(operands[x] in self.learned for x in kernel.constant if x in operands):
            return False
        gone = [self.nodes[name] for name in self._names(match.ops)]
        if match.splits:
            gone = [self.nodes[match.splits], *gone]
            operands = self._without_bias(match, operands)
        call = self._call(match, kernel, operands)
        for role, name in match.results.items():
            self.nodes[name].replace_all_uses_with(call[role])
            self.nodes[name] = call[role]
        for node in reversed(gone):
            if not node.users:
                self.graph.erase_node(node)
        return True

    def _names(self, ops: int) -> list[str]:
        return [op.name for i, op in enumerate(self.known.ops) if ops >> i & 1]

    def _operands(self, match: Match) -> dict[str, fx.Node] | None:
        """The nodes that the matched operations read; None where something was put between these operations."""
        names = self._names(match.ops) + ([match.splits] if match.splits else [])
        if not self.intact >= set(names):
            return None
        inside = {self.captured[name]: self.nodes[name] for name in names}
        read: dict[fx.Node, set[fx.Node]] = {}
        for before, now in inside.items():
            old, new = (pytree.tree_leaves((node.args, node.kwargs)) for node in (before, now))
            if len(old) != len(new):
                return None
            for traced, running in zip(old, new, strict=True):
                if not isinstance(traced, fx.Node) or not isinstance(running, fx.Node):
                    continue
                if traced in inside and running is not inside[traced]:
                    return None
                read.setdefault(traced, set()).add(running)
        names_of = {node: name for name, node in self.captured.items()}
        readers = {names_of[node]: nodes for node, nodes in read.items() if node in names_of}
        operands: dict[str, fx.Node] = {}
        for role, name in match.operands.items():
            nodes = readers.get(name, set())
            if len(nodes) != 1:
                return None
            (operands[role],) = nodes
        return operands

    def _without_bias(self, match: Match, operands: dict[str, fx.Node]) -> dict[str, fx.Node]:
        """The layer's matrix product alone, in its place; the layer goes with the operation that read it."""
        linear = self.nodes[match.splits]
        with self.graph.inserting_before(linear):
            product = self.graph.call_function(torch.ops.aten.linear.default, linear.args[:2])
        product.meta = dict(linear.meta)
        return {**operands, "x": product}

    def _call(self, match: Match, kernel: Kernel, operands: Mapping[str, fx.Node]) -> dict[str, Any]:
        """Nodes that call the kernel: ``calls``, and one for each result."""
        returned = kernel.returns
        last = max((self.nodes[name] for name in match.results.values()), key=_position(self.graph))
        value = {role: self.nodes[name].meta for role, name in match.results.items()}
        with self.graph.inserting_after(last):
            arguments: dict[str, Any] = {**operands, **match.options}
            call = self.graph.call_function(kernel.call, (), arguments)
        values = [value[role]["val"] for role in returned]
        call.meta = {"val": values[0] if len(returned) == 1 else tuple(values)}
        if len(returned) == 1:
            return {returned[0]: call, "calls": [call]}
        results: dict[str, Any] = {"calls": [call]}
        for index, role in reversed(list(enumerate(returned))):
            with self.graph.inserting_after(call):
                results[role] = self.graph.call_function(_item, (call, index))
            results[role].meta = dict(value[role])
            results["calls"].append(results[role])
        return results


def learned_nodes(captured: CapturedBlock, here: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    """The nodes, as they stand in ``here``, whose values depend on what is trained."""
    placeholders = [node for node in captured.exported.graph.nodes if node.op == "placeholder"]
    learned: set[fx.Node] = set()
    for node, slot in zip(placeholders, captured.slots, strict=True):
        if slot.kind == "parameter" or (isinstance(slot.target, int) and captured.input_grads[slot.target]):
            learned.add(node)
    for node in captured.exported.graph.nodes:
        if any(before in learned for before in node.all_input_nodes):
            learned.add(node)
    learned_here = {here[node] for node in learned if node in here}
    front = list(learned_here)
    while front:  # what only the running graph has, such as a slice of a trained table
        new = [user for user in front.pop().users if user not in learned_here]
        learned_here.update(new)
        front.extend(new)
    return learned_here


def _item(values: tuple[Tensor, ...], index: int) -> Tensor:
    return values[index]


_item.__name__ = "getitem"


def _position(graph: fx.Graph) -> Callable[[fx.Node], int]:
    order = {node: number for number, node in enumerate(graph.nodes)}
    return order.__getitem__
