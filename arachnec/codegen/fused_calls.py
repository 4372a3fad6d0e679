"""Calls of hand-written kernels in the place of operations: which can be one call, and what a kernel is called with."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from arachnec.fusion.fused_graph import rest_of
from arachnec.fusion.graph import FusionGraph, Kind, kind_of
from arachnec.fusion.match import match_region
from arachnec.fusion.walk import Match
from arachnec.ir.nodes import Fused, GraphOp
from arachnec.tracing.captured import CapturedBlock


@dataclass(frozen=True)
class Kernel:
    """``call`` takes the roles of a match as keywords; ``returns`` are the roles of its results, in order.

    ``constant`` are the operands that get no gradient from it.
    """

    call: Callable[..., Any]
    returns: tuple[str, ...]
    constant: tuple[str, ...] = ()


def _norm_modulate(x: Tensor, **arguments: Any) -> Any:
    return _kernel("norm_modulate", "norm_modulate")(x=x, **_vectors(x, arguments))


def _gate_residual_norm_modulate(residual: Tensor, **arguments: Any) -> Any:
    call = _kernel("norm_modulate", "gate_residual_norm_modulate")
    return call(residual=residual, **_vectors(residual, arguments))


def _bias_gelu(**arguments: Any) -> Any:
    return _kernel("bias_gelu", "bias_gelu")(**arguments)


def _gate_residual(residual: Tensor, **arguments: Any) -> Any:
    return _kernel("gate_residual", "gate_residual")(residual=residual, **_vectors(residual, arguments))


def _vectors(x: Tensor, arguments: dict[str, Any]) -> dict[str, Any]:
    """``arguments`` whose vectors have as many dimensions as rows x have at most: [B, S, 1, H] is [B, S, H]."""
    vectors = dict(arguments)
    for role in ("scale", "shift", "gate"):
        while role in vectors and vectors[role].dim() > x.dim():
            vectors[role] = vectors[role].squeeze(-2)
    return vectors


def _norm_rope(
    x: Tensor,
    heads: int,
    size: int,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    freqs_cis: Tensor | None = None,
    layout: str = "tokens",
    rotated: str = "all",
    pairs: bool = False,
    number: bool = False,
    **how: Any,
) -> Any:
    """``x`` is [B, S, heads, size] or with the last two in one, or, where ``layout`` is "heads", [B, heads, S, size].

    The result is [B, S, heads, size], or like x where the layout is "heads" or "rows"; with its ``pairs`` apart,
    [..., size / 2, 2], or each a complex ``number``. ``freqs_cis`` is complex, cos + i sin. Where only the tokens
    in "front" or at the "back" are ``rotated``, the tables are of these.
    """
    x = x.transpose(1, 2) if layout == "heads" else x
    batch, tokens = x.shape[:2]
    tables = {}
    if freqs_cis is not None:
        cos, sin = freqs_cis.real.float(), freqs_cis.imag.float()
    if cos is not None and sin is not None:
        tables = {
            role: _padded(table.flatten(0, -2), tokens, rotated, neutral)
            for role, table, neutral in (("cos", cos, 1.0), ("sin", sin, 0.0))
        }
    y = _kernel("norm_rope", "norm_rope")(x.reshape(batch, tokens, heads, size), **tables, **how)
    if layout == "heads":
        y = y.transpose(1, 2)
    elif layout == "rows":
        y = y.reshape(x.shape)
    if not pairs and not number:
        return y
    apart = y.unflatten(-1, (size // 2, 2))
    return torch.view_as_complex(apart) if number else apart


def _padded(table: Tensor, tokens: int, rotated: str, neutral: float) -> Tensor:
    """A table for all tokens from that of some; ``neutral`` leaves the others as they are."""
    if rotated == "all":
        return table
    rest = table.new_full((tokens - table.shape[0], table.shape[1]), neutral)
    return torch.cat([table, rest] if rotated == "front" else [rest, table])


def _kernel(module: str, name: str) -> Callable[..., Any]:
    """Imported when first called: Triton is not needed to plan."""
    kernel: Callable[..., Any] = getattr(importlib.import_module(f"arachnec.kernels.rowwise.{module}"), name)
    return kernel


KERNELS = {
    "norm_modulate": Kernel(_norm_modulate, ("y",)),
    "gate_residual_norm_modulate": Kernel(_gate_residual_norm_modulate, ("h", "y")),
    "norm_rope": Kernel(_norm_rope, ("y",), constant=("cos", "sin", "freqs_cis")),
    "gate_residual": Kernel(_gate_residual, ("h",)),
    "bias_gelu": Kernel(_bias_gelu, ("y",)),
}


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


SIZES = (torch.ops.aten.sym_size.int, torch.ops.aten.sym_numel.default)


def is_number(node: fx.Node) -> bool:
    """Whether a node is arithmetic on sizes."""
    value = node.meta.get("val")
    if value is not None:
        return not isinstance(value, Tensor | tuple | list)
    target: Any = node.target
    return node.op == "call_function" and (target in SIZES or getattr(target, "__module__", "") == "_operator")


def is_part(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"


def is_view(node: fx.Node) -> bool:
    """Whether a node moves no bytes."""
    if is_part(node) or is_number(node):
        return True
    return kind_of(GraphOp("", str(node.target), (), None)) is Kind.VIEW


def with_sizes(members: Sequence[fx.Node]) -> list[fx.Node]:
    """``members`` with the arithmetic on their sizes that they read again: the IR has folded it into shapes."""
    inside = set(members)
    below: set[fx.Node] = set()
    front = [user for node in members for user in node.users]
    while front:
        node = front.pop()
        if node not in below and node not in inside:
            below.add(node)
            front.extend(node.users)
    extra, front = set[fx.Node](), [x for node in members for x in node.all_input_nodes]
    while front:
        node = front.pop()
        if node in below and node not in extra and is_number(node):
            extra.add(node)
            front.extend(node.all_input_nodes)
    return [*members, *extra]


def convex(members: Iterable[fx.Node]) -> list[fx.Node]:
    """``members`` without those whose values leave them and come back: between them something else has to run.

    In the graph of a rank that is where a table is cut to the rank's tokens. Parts are taken out of a list before it
    comes in, so that a region's inputs are tensors and numbers.
    """
    given = set(members)
    parts = {node for node in given if is_part(node) and node.args[0] not in given}
    kept = [node for node in dict.fromkeys(members) if node not in parts]
    while kept:
        inside = set(kept)
        coming_back: set[fx.Node] = set()
        for node in reversed(kept[0].graph.nodes):
            if node not in inside and any(user in inside or user in coming_back for user in node.users):
                coming_back.add(node)
        rest = [node for node in kept if not any(user in coming_back for user in node.users)]
        if len(rest) == len(kept):
            break
        kept = rest
    return kept
