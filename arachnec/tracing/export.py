"""Export of one block. In: a block and its call. Out: a functional graph of flat tensors with symbolic dimensions."""

from __future__ import annotations

import contextlib
import re
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._C import DispatchKey
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Span
from arachnec.tracing.errors import (
    active_dropout_error,
    cannot_capture_error,
    random_operation_error,
    stack_span,
    writes_state_error,
)
from arachnec.tracing.record import training_mode, unflatten_call

aten = torch.ops.aten
ARITHMETIC = ("_operator", "math", "builtins")  # modules of the functions that compute with sizes
Sizes = dict[str, fx.Node]  # nodes that give a size, by its expression


def functional(program: ExportedProgram) -> ExportedProgram:
    """The program, every operation kept whole or said as the one that it comes to; ``program`` itself may change.

    ``run_decompositions`` runs a block twice more, symbols and all, and takes longer than the export itself. The few
    operations that it changes in most blocks are changed here, by a rule each. A program with any other that it would
    change, such as one that writes in place, is left to it.
    """
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


PREFIX = "block."
OURS = Path(__file__).parent
FIXED_SIZE = (
    "let the block follow its sizes from the shapes of its tensors, without int(), math functions or numbers that the "
    "model passes in beside the tensors: what those make, the model can compute and pass in as a tensor"
)
ASSERTIONS = (
    aten._assert_tensor_metadata.default,
    aten._assert_scalar.default,
    aten._assert_async.msg,
    aten.sym_constrain_range.default,
    aten.sym_constrain_range_for_size.default,
)
CASTS = (aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.type_as.default, aten._to_copy.default)
EMPTIES = (aten.empty_like.default, aten.new_empty.default, aten.empty.memory_format)
COPIES = (aten.clone.default, aten.alias.default, aten.lift_fresh_copy.default)


class FlatBlock(nn.Module):
    """A block as a function of its tensor arguments alone; every other argument is a constant of the capture."""

    def __init__(self, block: nn.Module, leaves: Sequence[Any], spec: pytree.TreeSpec) -> None:
        super().__init__()
        self.block = block
        self._constants = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self._spec = spec

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = list(self._constants)
        for position, tensor in zip(self._positions, tensors, strict=True):
            leaves[position] = tensor
        args, kwargs = unflatten_call(self.block, leaves, self._spec)
        return tuple(x for x in pytree.tree_leaves(self.block(*args, **kwargs)) if isinstance(x, Tensor))


def export_block(
    name: str, flat: FlatBlock, inputs: Sequence[Tensor], moving: Sequence[Sequence[int]]
) -> ExportedProgram:
    """``moving[i]`` are the dimensions of ``inputs[i]`` that become symbols. Raises ``UserError`` if export cannot."""
    dynamic = tuple(dict.fromkeys(dims, Dim.DYNAMIC) or None for dims in moving)
    from torch.export import _trace  # imports Triton, which reads a variable of the environment then

    silent = patch.object(_trace, "print", lambda *said, **to: None, create=True)
    with training_mode(flat), torch.enable_grad(), warnings.catch_warnings(), _without_cache(), silent:
        warnings.simplefilter("ignore")  # of torch.export's own workings, nothing a user could act on
        try:
            program: ExportedProgram = torch.export.export(flat, tuple(inputs), dynamic_shapes=(dynamic,), strict=False)
            program = functional(program)
        except UserError:
            raise
        except Exception as error:
            fixed = _fixing_line(flat, inputs, dynamic) if "specialized" in str(error) else None
            raise _cannot(name, error, fixed) from error
    refuse_state(name, program)
    refuse_random(name, program)
    clean(program.graph_module)
    return program


def forget_weights(program: ExportedProgram) -> None:
    """Give back the memory of the block and the inputs that it was exported from: a graph is kept for a whole run."""
    meta = {name: value.detach().to("meta") for name, value in program.state_dict.items()}
    program.state_dict.update(meta)
    program.example_inputs = None


def _without_cache() -> contextlib.AbstractContextManager[None]:
    """Without torch's cache of results: operations rarely recur on equal symbols, and keys are much of the time."""
    import torch._dynamo.config

    return torch._dynamo.config.patch(fake_tensor_cache_enabled=False)  # type: ignore[no-any-return]


def clean(module: fx.GraphModule) -> None:
    """Remove what export leaves behind: assertions, casts to the same type, copies that nothing can tell apart."""
    graph = module.graph
    _without_copies(graph)
    _interleaved(graph)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in ASSERTIONS:
            graph.erase_node(node)
        elif node.target is aten.view.default:
            node.target = (
                aten.reshape.default
            )  # strides differ between shapes, kernels and devices; a view must not fail
        elif (node.target in CASTS or node.target in COPIES) and _is_noop(node):
            source = node.args[0]
            assert isinstance(source, fx.Node)
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()


def _without_copies(graph: fx.Graph) -> None:
    """What was ``target.copy_(source)``, an operation without derivative, is the source, cast and expanded."""
    for node in graph.find_nodes(op="call_function", target=aten.copy.default):
        target, source = node.args[:2]
        assert isinstance(target, fx.Node) and isinstance(source, fx.Node)
        before, after = source.meta["val"], node.meta["val"]
        with graph.inserting_before(node):
            if before.dtype != after.dtype:
                source = _inserted(graph, node, aten.to.dtype, (source, after.dtype))
            if before.shape != after.shape:
                source = _inserted(graph, node, aten.expand_as.default, (source, target))
        node.replace_all_uses_with(source)
        graph.erase_node(node)


def _interleaved(graph: fx.Graph) -> None:
    """Even and odd places written one after the other into an empty tensor (rotary positions) are a stack."""
    for last in graph.find_nodes(op="call_function", target=aten.slice_scatter.default):
        first = last.args[0]
        if not (
            isinstance(first, fx.Node)
            and first.target is aten.slice_scatter.default
            and sum(bool(user.users) for user in first.users) == 1
        ):
            continue
        base, even, *start_even = first.args
        _, odd, *start_odd = last.args
        assert isinstance(base, fx.Node) and isinstance(even, fx.Node) and isinstance(odd, fx.Node)
        dim = int(start_even[0]) if start_even else 0  # type: ignore[arg-type]
        size = base.meta["val"].shape[dim]
        if base.target not in EMPTIES or not isinstance(size, int) or size % 2:
            continue
        ends = ((dim, 0, 2), (dim, 1, 2))
        if [_strided(start_even, size), _strided(start_odd, size)] != [*ends]:
            continue
        dim %= base.meta["val"].ndim
        with graph.inserting_before(last):
            stacked = _inserted(graph, last, aten.stack.default, ([even, odd], dim + 1))
            result = _inserted(graph, last, aten.flatten.using_ints, (stacked, dim, dim + 1))
        last.replace_all_uses_with(result)
        graph.erase_node(last)


def _strided(arguments: Sequence[Any], size: int) -> tuple[int, int, int] | None:
    """Dimension, start and step of a slice that reaches to the end; None for another."""
    dim, start, end, step = list(arguments) + [0, 0, None, 1][len(arguments) :]
    return (dim, start or 0, step) if end is None or end >= size else None


def _inserted(graph: fx.Graph, like: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    """A new node with the value and the source line that an exported one would have."""
    node = graph.call_function(target, args)
    values = fx.map_arg(args, lambda n: n.meta["val"])
    with like.meta["val"].fake_mode:
        node.meta = {**like.meta, "val": target(*values)}
    return node


def _is_noop(node: fx.Node) -> bool:
    source = node.args[0]
    if not isinstance(source, fx.Node) or node.kwargs.get("memory_format") is not None or node.kwargs.get("copy"):
        return False
    before, after = source.meta.get("val"), node.meta.get("val")
    return (
        isinstance(before, Tensor)
        and isinstance(after, Tensor)
        and before.dtype == after.dtype
        and before.device == after.device
        and before.layout == after.layout
    )


def refuse_state(name: str, program: ExportedProgram) -> None:
    """A functionalised graph returns what was written in place: anything but a user output is refused."""
    for spec in program.graph_signature.output_specs:
        if spec.kind is not OutputKind.USER_OUTPUT:
            target = (spec.target or "its input").removeprefix(PREFIX)
            node = next((n for n in program.graph.nodes if n.name == getattr(spec.arg, "name", None)), None)
            raise writes_state_error(name, target, stack_span(node.meta.get("stack_trace")) if node else None)


def refuse_random(name: str, program: ExportedProgram) -> None:
    """Dropout that drops, and every other random operation, would make the gradient depend on the plan."""
    for node in program.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        span = stack_span(node.meta.get("stack_trace"))
        probability = _dropout(node)
        if probability:
            raise active_dropout_error(name, probability, span)
        if probability is None and torch.Tag.nondeterministic_seeded in node.target.tags:
            raise random_operation_error(name, str(node.target), span)


def is_seeded(operation: torch._ops.OpOverload) -> bool:
    """Whether it draws random numbers; an attention that may drop is none."""
    return torch.Tag.nondeterministic_seeded in operation.tags and "dropout_p" not in str(operation._schema)


def _dropout(node: fx.Node) -> float | None:
    """The probability with which this node drops; None if it is no kind of dropout."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    given: dict[str, Any] = dict(zip(names, node.args, strict=False)) | node.kwargs
    if "dropout_p" in names:
        return float(given.get("dropout_p", 0.0))
    if node.target.overloadpacket in (aten.dropout, aten.native_dropout, aten.feature_dropout, aten.alpha_dropout):
        return float(given["p"]) if given.get("train") is not False else 0.0
    return None


def refuse_dropout_modules(model: nn.Module) -> None:
    """The same, said at the module's name, for the whole model."""
    for path, module in model.named_modules():
        probability = getattr(module, "p", 0.0)
        if isinstance(module, nn.modules.dropout._DropoutNd) and probability > 0:
            raise active_dropout_error(f"`{path}`", probability)


def _cannot(name: str, error: Exception, fixed: str | None) -> UserError:
    message = str(error).strip()
    reason = (message.splitlines() or [type(error).__name__])[0]
    if "specialized" in message:
        value = re.search(r"to be a constant \((\d+)\)", message)
        reason = "it fixes a size that changes from clip to clip" + (f", {value[1]} in this one" if value else "")
        return cannot_capture_error(name, reason, FIXED_SIZE, stack_span(fixed))
    if "Constraints violated" in message:
        lines = [line.strip(" -") for line in message.splitlines() if "!=" in line or "==" in line]
        reason = f"it fixes a size that changes with the clip ({(lines or [reason])[0]})"
    return cannot_capture_error(name, f"{type(error).__name__}: {reason}"[:400], span=block_span(error))


def _fixing_line(flat: FlatBlock, inputs: Sequence[Tensor], dynamic: Any) -> str | None:
    """The stack at which export makes a number of a size, by exporting once more; None where torch does not tell."""
    stacks: list[list[str]] = []
    original = ShapeEnv._set_replacement

    def listening(env: ShapeEnv, symbol: Any, target: Any, message: str) -> None:
        if target.is_Integer:
            stacks.append(_users(traceback.extract_stack()[:-1]))  # less this function
        original(env, symbol, target, message)

    with patch.object(ShapeEnv, "_set_replacement", listening), contextlib.suppress(Exception):
        torch.export.export(flat, tuple(inputs), dynamic_shapes=(dynamic,), strict=False)
    return "".join(stacks[0]) or None if stacks else None


def block_span(error: BaseException) -> Span | None:
    """The innermost line of the block that an exception, or one behind it, went through."""
    return stack_span("".join(_frames(error)))


def _frames(error: BaseException) -> list[str]:
    chain: list[BaseException] = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None and inner not in chain:
        chain.append(inner)
    return [line for e in reversed(chain) for line in _users(traceback.extract_tb(e.__traceback__))]


def _users(frames: Sequence[traceback.FrameSummary]) -> list[str]:
    """The lines of a stack that lie inside the block: below the last one of the tracer itself, and not torch's."""
    last = max((number for number, f in enumerate(frames) if Path(f.filename).parent == OURS), default=-1)
    inside = [f for f in frames[last + 1 :] if "/torch/" not in f.filename]
    return [f'File "{f.filename}", line {f.lineno}\n' for f in inside]
