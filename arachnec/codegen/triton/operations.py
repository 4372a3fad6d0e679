"""The operations that templates know, and how each is written in Triton."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from arachnec.codegen.triton.index import Size, Unsupported

aten, prims = torch.ops.aten, torch.ops.prims

POINTWISE: dict[Any, str] = {
    aten.add.Tensor: "({0} + {1})", aten.add.Scalar: "({0} + {1})", aten.sub.Tensor: "({0} - {1})",
    aten.sub.Scalar: "({0} - {1})", aten.rsub.Scalar: "({1} - {0})", aten.mul.Tensor: "({0} * {1})",
    aten.mul.Scalar: "({0} * {1})", aten.div.Tensor: "({0} / {1})", aten.div.Scalar: "({0} / {1})",
    prims.div.default: "({0} / {1})", aten.neg.default: "(-{0})", aten.rsqrt.default: "(1.0 / tl.sqrt({0}))",
    aten.sqrt.default: "tl.sqrt({0})", aten.reciprocal.default: "(1.0 / {0})", aten.exp.default: "tl.exp({0})",
    aten.exp2.default: "tl.exp2({0})", aten.log.default: "tl.log({0})", aten.log2.default: "tl.log2({0})",
    aten.log1p.default: "tl.log(1.0 + {0})", aten.expm1.default: "(tl.exp({0}) - 1.0)",
    aten.erf.default: "tl.erf({0})", aten.abs.default: "tl.abs({0})", aten.floor.default: "tl.floor({0})",
    aten.ceil.default: "tl.ceil({0})", aten.sin.default: "tl.sin({0})", aten.cos.default: "tl.cos({0})",
    aten.sigmoid.default: "(1.0 / (1.0 + tl.exp(-{0})))",
    aten.tanh.default: "(2.0 / (1.0 + tl.exp(-2.0 * {0})) - 1.0)",
    aten.sign.default: "tl.where({0} > 0, 1.0, tl.where({0} < 0, -1.0, {0} * 0.0))",
    aten.maximum.default: "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    aten.minimum.default: "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    aten.relu.default: "tl.maximum({0}, 0.0, propagate_nan=tl.PropagateNan.ALL)",
    aten.clamp_min.default: "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    aten.clamp_max.default: "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    aten.where.self: "tl.where({0}, {1}, {2})", aten.isnan.default: "({0} != {0})",
    aten.logical_and.default: "({0} & {1})", aten.logical_or.default: "({0} | {1})",
    aten.bitwise_and.Tensor: "({0} & {1})", aten.bitwise_or.Tensor: "({0} | {1})",
    aten.logical_not.default: "({0} == 0)", aten.bitwise_not.default: "(~{0})",
    **{getattr(getattr(aten, name), kind): f"({{0}} {sign} {{1}})"
       for name, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="), ("eq", "=="), ("ne", "!="))
       for kind in ("Scalar", "Tensor")},
}  # fmt: skip
OF_INTEGERS = (aten.add.Tensor, aten.add.Scalar, aten.sub.Tensor, aten.sub.Scalar, aten.rsub.Scalar,
               aten.mul.Tensor, aten.mul.Scalar, aten.neg.default, aten.where.self, aten.bitwise_and.Tensor,
               aten.bitwise_or.Tensor)  # fmt: skip
OF_NUMBERS = {operator.add: "({0} + {1})", operator.sub: "({0} - {1})", operator.mul: "({0} * {1})",
              operator.truediv: "({0} / {1})", operator.neg: "(-{0})", torch.sym_float: "{0}"}  # fmt: skip
SAME = (aten.alias.default, aten.clone.default, aten.detach.default, aten.lift_fresh_copy.default)
CASTS = (aten._to_copy.default, prims.convert_element_type.default, aten.to.dtype)
RESHAPES = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default,
            aten.squeeze.dims, aten.squeeze.dim, aten.squeeze.default)  # fmt: skip
SPLITS = (aten.unbind.int, aten.split.Tensor, aten.split_with_sizes.default)
JOINS = (aten.cat.default, aten.slice_scatter.default, aten.select_scatter.default)
SUMS = (aten.sum.dim_IntList, prims.sum.default)
LARGEST = (aten.amax.default, prims.amax.default)
FULL: dict[Any, Callable[[fx.Node], Any]] = {
    aten.full.default: lambda node: node.args[1], aten.full_like.default: lambda node: node.args[1],
    aten.scalar_tensor.default: lambda node: node.args[0], aten.zeros_like.default: lambda node: 0,
    aten.zeros.default: lambda node: 0, aten.new_zeros.default: lambda node: 0,
    aten.ones_like.default: lambda node: 1, aten.ones.default: lambda node: 1,
}  # fmt: skip
HALVES = {torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16"}


def size_of(size: Any) -> Size:
    """A dimension, or any number made of sizes: an int, or a sympy expression."""
    if not isinstance(size, torch.SymInt):
        return int(size)
    expression = size.node.expr
    return int(expression) if expression.is_number else expression


def shape_of(value: Tensor) -> tuple[Size, ...]:
    return tuple(size_of(size) for size in value.shape)


def is_fixed(size: Size) -> bool:
    return isinstance(size, int)


def value_of(node: fx.Node) -> Tensor:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        raise Unsupported(f"`{node.name}` is no tensor")
    return value


def option(node: fx.Node, position: int, name: str, default: Any) -> Any:
    """An argument that may be given by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def number_of(argument: Any) -> Any:
    """A number among the arguments, which may be made of sizes."""
    if not isinstance(argument, fx.Node):
        return argument
    if not isinstance(argument.meta.get("val"), torch.SymInt | int):
        raise Unsupported(f"`{argument.name}` is no number made of sizes")
    return size_of(argument.meta["val"])


def dim_of(node: fx.Node, rank: int) -> int:
    target: Any = node.target
    position = {aten.cat.default: 1, aten.slice.Tensor: 1, aten.unbind.int: 1}.get(target, 2)
    return int(option(node, position, "dim", 0)) % rank


def reduced_dims(node: fx.Node) -> tuple[int, ...]:
    """The dimensions of its operand that a reduction runs over; none where it is no reduction."""
    if node.target not in SUMS and node.target not in LARGEST:
        return ()
    rank = value_of(node.all_input_nodes[0]).ndim
    return tuple(sorted({int(dim) % rank for dim in option(node, 1, "dim", None) or range(rank)}))


def along_a_symbol(node: fx.Node) -> bool:
    """Whether a node reduces rows whose width is known only at run time."""
    dims = reduced_dims(node)
    shape = shape_of(value_of(node.all_input_nodes[0])) if dims else ()
    return bool(dims) and dims == (len(shape) - 1,) and not is_fixed(shape[-1])


def sums_rows(node: fx.Node) -> bool:
    """Whether a node adds up what different programs compute: over what clips change, or outside of other lanes."""
    if node.target not in SUMS or along_a_symbol(node):
        return False
    shape, dims = shape_of(value_of(node.all_input_nodes[0])), reduced_dims(node)
    real = [dim for dim in dims if shape[dim] != 1]
    kept = [dim for dim, size in enumerate(shape) if dim not in dims and is_fixed(size) and size != 1]
    return any(not is_fixed(shape[dim]) for dim in real) or bool(real and kept and max(kept) > min(real))


def is_part(node: fx.Node) -> bool:
    return node.target is operator.getitem


def inputs_of(node: fx.Node) -> list[fx.Node]:
    """The nodes whose numbers a node reads: a list of parts is looked through, and sizes are no inputs."""
    if node.target in FULL:
        return []
    return [x for x in node.all_input_nodes if isinstance(x.meta.get("val"), Tensor | tuple | list)]


def needed(nodes: list[fx.Node], ends: frozenset[fx.Node] = frozenset()) -> list[fx.Node]:
    """``nodes`` and what they are made of, up to ``ends``."""
    ancestry: dict[fx.Node, None] = {}
    front = list(nodes)
    while front:
        node = front.pop()
        if node not in ancestry:
            ancestry[node] = None
            if node not in ends:
                front.extend(inputs_of(node))
    return list(ancestry)
