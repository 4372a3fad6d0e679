"""A program of ``torch.export`` made functional: no operation writes, or chooses between a view and a copy.

``run_decompositions`` runs a block twice more, symbols and all, and takes longer than the export itself. The few
operations that it changes in most blocks are changed here, by a rule each. A program with any other that it would
change, such as one that writes in place, is left to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._C import DispatchKey
from torch.export import ExportedProgram

aten = torch.ops.aten
ARITHMETIC = ("_operator", "math", "builtins")  # modules of the functions that compute with sizes
Sizes = dict[str, fx.Node]  # nodes that give a size, by its expression


def functional(program: ExportedProgram) -> ExportedProgram:
    """The program, every operation kept whole or said as the one that it comes to; ``program`` itself may change."""
    nodes = [node for node in program.graph.nodes if node.op not in ("placeholder", "output")]
    if all(node.target in RULES or _stays(node) for node in nodes) and _rewritten(nodes):
        return program
    decomposed: ExportedProgram = program.run_decompositions({})
    return decomposed


def _stays(node: fx.Node) -> bool:
    """Whether decomposing would leave it as it is."""
    operation = node.target
    if node.op != "call_function":
        return False
    if not isinstance(operation, torch._ops.OpOverload):
        return getattr(operation, "__module__", None) in ARITHMETIC
    schema = operation._schema
    composite = operation.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)
    aliases = any(argument.alias_info is not None for argument in schema.arguments)
    unsafe = schema.is_mutable or torch.Tag.maybe_aliasing_or_mutating in operation.tags
    return not unsafe and not (composite and (aliases or operation.namespace != "aten"))


def _rewritten(nodes: list[fx.Node]) -> bool:
    """Whether every rule held. What was rewritten before one that did not means the same."""
    sizes: Sizes = {}
    for node in nodes:
        if node.target is aten.sym_size.int:
            sizes.setdefault(str(node.meta["val"]), node)
        elif node.target in RULES and not RULES[node.target](node, sizes):
            return False
    return True


def _cast(node: fx.Node, sizes: Sizes) -> bool:
    source, *said = node.args
    before, after = _value(source), _value(node)
    more = len(said) > (2 if node.target is aten.to.device else 1) or {"copy", "memory_format"} & set(node.kwargs)
    if more or before.device != after.device:
        return False
    node.target, node.args, node.kwargs = aten._to_copy.default, (source,), {"dtype": after.dtype}
    return True


def _kept(node: fx.Node, sizes: Sizes) -> bool:
    """Dropout that drops nothing is a copy; another is refused by its name."""
    source, probability, train = node.args
    if not train or probability == 0:
        node.target, node.args = aten.clone.default, (source,)
    return True


def _split(node: fx.Node, sizes: Sizes) -> bool:
    source, chunks, *rest = node.args
    dim: Any = rest[0] if rest else node.kwargs.get("dim", 0)
    size = _value(source).shape[dim]
    if not isinstance(size, int) or size == 0:
        return False
    assert isinstance(chunks, int)
    node.target, node.args, node.kwargs = aten.split.Tensor, (source, -(-size // chunks), dim), {}
    return True


def _reshaped(node: fx.Node, sizes: Sizes) -> bool:
    """Where every size that results is a number, or one that is known or comes in."""
    source = node.args[0]
    shape = [_size(node, source, size, sizes) for size in _value(node).shape]
    if None in shape:
        return False
    node.target, node.args, node.kwargs = aten.reshape.default, (source, shape), {}
    return True


def _size(node: fx.Node, source: Any, size: int | torch.SymInt, sizes: Sizes) -> int | fx.Node | None:
    if isinstance(size, int):
        return size
    given = [str(one) for one in _value(source).shape]
    if str(size) not in sizes and str(size) in given:
        with node.graph.inserting_before(node):
            inserted = node.graph.call_function(aten.sym_size.int, (source, given.index(str(size))))
        inserted.meta = {**node.meta, "val": size}
        sizes[str(size)] = inserted
    return sizes.get(str(size))


def _value(node: Any) -> torch.Tensor:
    value: torch.Tensor = node.meta["val"]
    return value


RULES: dict[Any, Callable[[fx.Node, Sizes], bool]] = {
    aten.to.dtype: _cast,
    aten.to.dtype_layout: _cast,
    aten.to.device: _cast,
    aten.dropout.default: _kept,
    aten.chunk.default: _split,
    aten.flatten.using_ints: _reshaped,
    aten.unflatten.int: _reshaped,
    aten.reshape.default: _reshaped,
}
