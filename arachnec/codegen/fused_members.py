"""Which nodes of a graph can be one call: views, arithmetic on sizes, and no way out and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from arachnec.fusion.graph import Kind, kind_of
from arachnec.ir.nodes import GraphOp

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
