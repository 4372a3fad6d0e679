"""A captured graph as a graph of the cascade IR: readable names, targets as strings, every shape in B, S and T."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from arachnec.ir.nodes import Graph, GraphInput, GraphOp, TensorType
from arachnec.ir.values import Attributes, Value
from arachnec.tracing.captured import CapturedBlock

DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16",
    torch.int64: "i64", torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "i1",
}  # fmt: skip
ENDLESS = 2**63 - 1  # a slice without end


def dtype_name(dtype: torch.dtype) -> str:
    return DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def block_graph(captured: CapturedBlock) -> Graph:
    """The graph of a block class. Size arithmetic is folded into the shapes; the text depends on the model alone."""
    names = node_names(captured)
    inputs, ops = [], []
    for node in captured.exported.graph.nodes:
        if node.op == "placeholder":
            inputs.append(GraphInput(names[node], _type(captured, node) or TensorType("number", ())))
        elif node.op == "call_function" and not _is_size(node):
            ops.append(_op(captured, node, names))
    results = captured.exported.graph.output_node().args[0]
    assert isinstance(results, Sequence)
    outputs = tuple(names[node] for node in results if isinstance(node, fx.Node))
    return Graph(captured.name, tuple(inputs), tuple(ops), outputs, Attributes.of(instances=len(captured.instances)))


def node_names(captured: CapturedBlock) -> dict[fx.Node, str]:
    """Inputs and parameters by their own names; results as the operation and a number."""
    names: dict[fx.Node, str] = {}
    counts: dict[str, int] = {}
    placeholders = [node for node in captured.exported.graph.nodes if node.op == "placeholder"]
    for node, slot in zip(placeholders, captured.slots, strict=True):
        names[node] = captured.input_names[slot.target] if isinstance(slot.target, int) else slot.target
    taken = set(names.values())
    for node in captured.exported.graph.nodes:
        if node.op != "call_function":
            continue
        stem = _target(node).removeprefix("aten.").split(".")[0].strip("_")
        while True:
            number = counts[stem] = counts.get(stem, -1) + 1
            name = f"{stem}_{number}"
            if name not in taken:
                break
        names[node] = name
    return names


def _target(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    return str(getattr(node.target, "__name__", node.target))


def _is_size(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (torch.SymInt, torch.SymBool, torch.SymFloat, int, float, bool))


def _type(captured: CapturedBlock, node: fx.Node) -> TensorType | None:
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return None
    return TensorType(dtype_name(value.dtype), tuple(_size(size) for size in captured.dims(node)))


def _size(size: sympy.Expr) -> int | str:
    return int(size) if size.is_Integer else str(size).replace("**", "^")


def _op(captured: CapturedBlock, node: fx.Node, names: dict[fx.Node, str]) -> GraphOp:
    operands: list[str] = []
    attributes: list[tuple[str, Value]] = []
    for name, argument in _arguments(node):
        listed = argument if isinstance(argument, Sequence) else (argument,)
        tensors = [x for x in listed if isinstance(x, fx.Node) and not _is_size(x)]
        if tensors:
            operands += [names[x] for x in tensors]
        elif (value := _value(captured, argument)) is not None:
            attributes.append((name, value))
    return GraphOp(names[node], _target(node), tuple(operands), _type(captured, node), Attributes(tuple(attributes)))


def _arguments(node: fx.Node) -> list[tuple[str, Any]]:
    """Each argument with its name in the operation's schema; where there is none, its position."""
    if isinstance(node.target, torch._ops.OpOverload):
        names = [argument.name for argument in node.target._schema.arguments]
    else:
        names = [f"arg{i}" for i in range(len(node.args))] if len(node.args) != 2 else ["input", "index"]
    return [*zip(names, node.args, strict=False), *node.kwargs.items()]


def _value(captured: CapturedBlock, argument: Any) -> Value | None:
    """An attribute value; None for what says nothing (absent arguments, where a tensor lives)."""
    if isinstance(argument, fx.Node):
        size = argument.meta["val"]
        return _size(captured.expression(size)) if isinstance(size, (int, torch.SymInt)) else str(size)
    if argument is None or isinstance(argument, torch.device | torch.layout):
        return None
    if isinstance(argument, torch.dtype):
        return dtype_name(argument)
    if isinstance(argument, float):
        return argument if math.isfinite(argument) else str(argument)
    if isinstance(argument, bool | int | str):
        return "end" if argument == ENDLESS and argument is not True else argument
    if isinstance(argument, Sequence):
        items = tuple(_value(captured, item) for item in argument)
        return tuple(item for item in items if item is not None)
    return str(argument)
