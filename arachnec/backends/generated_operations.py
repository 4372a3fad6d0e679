"""The operations that templates know, and what they make of the sizes: which are rows, and how a row's lanes lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from arachnec.backends.generated_index import Lanes, Unsupported, finest

aten, prims = torch.ops.aten, torch.ops.prims

POINTWISE: dict[Any, str] = {
    aten.add.Tensor: "({0} + {1})", aten.add.Scalar: "({0} + {1})", aten.sub.Tensor: "({0} - {1})",
    aten.sub.Scalar: "({0} - {1})", aten.rsub.Scalar: "({1} - {0})", aten.mul.Tensor: "({0} * {1})",
    aten.mul.Scalar: "({0} * {1})", aten.div.Tensor: "({0} / {1})", aten.div.Scalar: "({0} / {1})",
    prims.div.default: "({0} / {1})", aten.neg.default: "(-{0})", aten.rsqrt.default: "(1.0 / tl.sqrt({0}))",
    aten.sqrt.default: "tl.sqrt({0})", aten.reciprocal.default: "(1.0 / {0})", aten.exp.default: "tl.exp({0})",
    aten.log.default: "tl.log({0})", aten.erf.default: "tl.erf({0})", aten.abs.default: "tl.abs({0})",
    aten.sin.default: "tl.sin({0})", aten.cos.default: "tl.cos({0})",
    aten.sigmoid.default: "(1.0 / (1.0 + tl.exp(-{0})))",
    aten.tanh.default: "(2.0 / (1.0 + tl.exp(-2.0 * {0})) - 1.0)",
    aten.maximum.default: "tl.maximum({0}, {1})", aten.minimum.default: "tl.minimum({0}, {1})",
    aten.relu.default: "tl.maximum({0}, 0.0)", aten.where.self: "tl.where({0}, {1}, {2})",
    aten.gt.Scalar: "({0} > {1})", aten.ge.Scalar: "({0} >= {1})", aten.lt.Scalar: "({0} < {1})",
    aten.le.Scalar: "({0} <= {1})", aten.eq.Scalar: "({0} == {1})", aten.gt.Tensor: "({0} > {1})",
    aten.lt.Tensor: "({0} < {1})",
}  # fmt: skip
SAME = (aten.alias.default, aten.clone.default, aten.detach.default, aten.lift_fresh_copy.default)
CASTS = (aten._to_copy.default, prims.convert_element_type.default, aten.to.dtype)
RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default,
            aten.squeeze.dims, aten.squeeze.dim, aten.squeeze.default)  # fmt: skip
SUMS = (aten.sum.dim_IntList, prims.sum.default, aten.mean.dim)
FULL = (aten.full.default, aten.full_like.default, aten.zeros_like.default, aten.ones_like.default, aten.zeros.default)
TYPES = {torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16", torch.float32: "tl.float32"}


def is_symbolic(size: Any) -> bool:
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def static_dims(value: Tensor) -> tuple[int, ...]:
    return tuple(int(size) for size in value.shape if not is_symbolic(size))


def lead_dims(value: Tensor) -> tuple[str, ...]:
    return tuple(str(size) for size in value.shape if is_symbolic(size))


def args_of(node: fx.Node) -> tuple[Any, ...]:
    return node.args


def option(node: fx.Node, position: int, name: str, default: Any) -> Any:
    """An argument that may be given by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def sums_rows(node: fx.Node) -> bool:
    """Whether a node adds up what different programs compute."""
    if node.target not in SUMS and node.target is not prims.var.default:
        return False
    shape = node.all_input_nodes[0].meta["val"].shape
    return any(is_symbolic(shape[dim % len(shape)]) for dim in args_of(node)[1])


def lanes_of(nodes: Sequence[fx.Node], stores: Sequence[fx.Node], sums: Sequence[fx.Node]) -> Lanes:
    rows = [*stores, *(node.all_input_nodes[0] for node in sums)]
    size = max(math.prod(static_dims(node.meta["val"])) for node in rows)
    if any(math.prod(static_dims(node.meta["val"])) != size for node in rows):
        raise Unsupported("its results have rows of different sizes")
    whole = [static_dims(n.meta["val"]) for n in nodes if math.prod(static_dims(n.meta["val"])) == size]
    parts = [static_dims(n.meta["val"]) for n in nodes if n.target in (aten.view.default, aten.reshape.default)]
    sizes = finest([*whole, *parts])
    reduced = [
        math.prod(int(n.all_input_nodes[0].meta["val"].shape[d]) for d in args_of(n)[1])
        for n in nodes
        if (n.target in SUMS or n.target is prims.var.default) and not sums_rows(n)
    ]
    least = min(reduced, default=size)
    inner = next((k for k in range(len(sizes) + 1) if math.prod(sizes[len(sizes) - k :]) == least), None)
    if inner is None:
        raise Unsupported("it reduces a part of a row that ends in the middle of a dimension")
    return Lanes(sizes, inner)


def keeps_first(node: fx.Node) -> bool:
    value = node.all_input_nodes[0].meta["val"]
    lead = [dim for dim, size in enumerate(value.shape) if is_symbolic(size)]
    kept = [k for k, dim in enumerate(lead) if dim not in {d % value.ndim for d in args_of(node)[1]}]
    if kept not in ([], [0]):
        raise Unsupported(f"`{node.name}` adds up rows that are not neighbours")
    return bool(kept)


def static_runs(value: Tensor) -> list[tuple[list[int], list[int]]]:
    """Neighbouring dimensions of fixed size between those that clips change: their numbers, and their sizes."""
    runs: list[tuple[list[int], list[int]]] = [([], [])]
    for dim, size in enumerate(value.shape):
        if is_symbolic(size):
            runs.append(([], []))
        else:
            runs[-1][0].append(dim)
            runs[-1][1].append(int(size))
    return runs


def dim_of(node: fx.Node, rank: int) -> int:
    target: Any = node.target
    position = {aten.cat.default: 1, aten.slice.Tensor: 1, aten.unbind.int: 1}.get(target, 2)
    return int(option(node, position, "dim", 0)) % rank


def bounds(node: fx.Node, size: int, position: int) -> tuple[int, int, int]:
    start, stop, step = ([*args_of(node)[position:], *(None,) * 3])[:3]
    if any(isinstance(x, fx.Node) for x in (start, stop, step)):
        raise Unsupported(f"`{node.name}` cuts where only a run knows")
    first, last, _ = slice(start, stop, None).indices(size)
    return first, last, int(step or 1)


def needed(nodes: Sequence[fx.Node]) -> list[fx.Node]:
    found: dict[fx.Node, None] = {}
    front = list(nodes)
    while front:
        node = front.pop()
        if node not in found:
            found[node] = None
            front.extend(x for x in node.all_input_nodes if isinstance(x.meta.get("val"), Tensor))
    return list(found)
