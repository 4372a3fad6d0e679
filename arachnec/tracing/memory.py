"""Memory of a captured block: what it saves for the backward and needs while it runs.

In: a captured block. Out: polynomials in B, S and T, fitted to runs on the meta device.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import sympy
import torch
import torch.fx.experimental._config
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

from arachnec.tracing.captured import CapturedBlock
from arachnec.tracing.dims import B, S, T
from arachnec.tracing.flops import SDPA
from arachnec.tracing.record import storage_of

ONE = sympy.Integer(1)
RMS_NORM = torch.ops.aten.rms_norm.default
# Tried in this order: most costs are per clip; tables of positions are not; attention written out is quadratic.
BASES = (
    (B * S, B * T, B, ONE),
    (B * S, B * T, B, S, T, ONE),
    (B * S, B * T, B, B * T**2, ONE),
    (B * S, B * T, B, B * S**2, ONE),  # of layers between blocks there are few examples
    (B * S, B * T, B * S**2, B * S * T, B * T**2),
    (B * S, B * T, B, S, T, ONE, B * S**2, B * S * T, B * T**2),
)
Point = dict[sympy.Symbol, int]
Matrix = numpy.ndarray[Any, numpy.dtype[numpy.float64]]


@dataclass(frozen=True)
class BlockMemory:
    """Bytes as expressions in B, S and T, parameters not counted.

    ``saved``: what autograd keeps of one call, made in it or in the block before; ``chained``: the inputs that come
    from the block before, kept if every block is recomputed; ``shared``: inputs that all blocks read, kept once;
    ``workspace``: the most that is alive at one moment of a forward that keeps nothing.
    """

    saved: sympy.Expr
    chained: sympy.Expr
    shared: sympy.Expr
    workspace: sympy.Expr


def block_memory(captured: CapturedBlock, chained: Sequence[bool], *, gpu: bool = False) -> BlockMemory:
    """``chained[i]``: input i is a block's output. Fused attention keeps no scores (arXiv 2205.14135), and a GPU's RMS
    norm is one kernel, which keeps its input in its own precision, where a CPU's keeps two copies in fp32."""
    points, graph = _points(captured), _on_meta(captured)
    try:
        rows = [_measured(captured, graph, point, chained, gpu) for point in points]
    except RuntimeError:  # as long as that it cannot be: it has a table of positions, say
        points = list(captured.examples)
        rows = [_measured(captured, graph, point, chained, gpu) for point in points]
    saved, shared, workspace = (fit_polynomial(values, points) for values in zip(*rows, strict=True))
    inputs = zip(captured.input_dims, captured.input_nodes, chained, strict=True)
    kept = (sympy.prod(dims) * node.meta["val"].dtype.itemsize for dims, node, link in inputs if link)
    return BlockMemory(saved, sympy.expand(sum(kept, sympy.Integer(0))), shared, workspace)


def fit_polynomial(values: Sequence[float], points: Sequence[Point]) -> sympy.Expr:
    """The simplest polynomial in B, S and T with these values; where there is none, the closest without S^2.

    Symbols that no point moves are left out. The closest one has no negative term (NNLS, Lawson and Hanson 1974).
    """
    moved = {symbol for symbol in (B, S, T) if len({point[symbol] for point in points}) > 1}
    for basis in BASES:
        terms = [term for term in basis if term.free_symbols <= moved]
        fitted = _exact(terms, values, points)
        if fitted is not None:
            return fitted
    return closest([term for term in BASES[1] if term.free_symbols <= moved], values, points)


def encoder_polynomial(values: Sequence[float], points: Sequence[Point]) -> sympy.Expr:
    """What an encoder costs: in S alone or in T alone where that explains every value, else the closest of both."""
    return exact_encoder_polynomial(values, points) or closest((S, T, ONE), values, points)


def exact_encoder_polynomial(values: Sequence[float], points: Sequence[Point]) -> sympy.Expr | None:
    """In S alone or in T alone; None where neither explains every value."""
    for basis in ((ONE,), (S,), (T,), (S, ONE), (T, ONE), (T, T**2), (S, S**2)):
        fitted = _exact(basis, values, points)
        if fitted is not None:
            return fitted
    return None


def closest(terms: Sequence[sympy.Expr], values: Sequence[float], points: Sequence[Point]) -> sympy.Expr:
    """The combination of ``terms``, none negative, with the least squared relative error."""
    from scipy.optimize import nnls

    matrix, weights = _matrix(terms, points), _weights(values)
    scale = numpy.abs(matrix).max(axis=0)
    solution, _ = nnls(matrix / scale * weights[:, None], numpy.array(values, dtype=float) * weights)
    return _combined([float(x) for x in solution / scale], terms)


def _exact(terms: Sequence[sympy.Expr], values: Sequence[float], points: Sequence[Point]) -> sympy.Expr | None:
    matrix, weights = _matrix(terms, points), _weights(values)
    if numpy.linalg.matrix_rank(matrix) < len(terms):
        return None
    scale = numpy.abs(matrix).max(axis=0)
    right = numpy.array(values, dtype=float) * weights
    solution = numpy.linalg.lstsq(matrix / scale * weights[:, None], right, rcond=1e-12)[0] / scale
    expression = _combined([round(float(x), 3) for x in solution], terms)
    at = (float(expression.subs(point)) for point in points)
    return expression if all(abs(a - b) <= 1e-9 * max(1.0, abs(b)) for a, b in zip(at, values, strict=True)) else None


def _matrix(terms: Sequence[sympy.Expr], points: Sequence[Point]) -> Matrix:
    matrix: Matrix = numpy.array([[float(term.subs(point)) for term in terms] for point in points])
    return matrix


def _weights(values: Sequence[float]) -> Matrix:
    weights: Matrix = 1.0 / numpy.maximum(numpy.abs(numpy.array(values, dtype=float)), 1.0)
    return weights


def _combined(coefficients: Sequence[float], terms: Sequence[sympy.Expr]) -> sympy.Expr:
    return sum((sympy.Float(c) * term for c, term in zip(coefficients, terms, strict=True)), sympy.Integer(0))


def _points(captured: CapturedBlock) -> list[Point]:
    """Sizes to measure at; where one is no combination of B, S and T, only recorded ones are known to go together."""
    recorded = captured.examples
    if set(recorded[0]) - {B, S, T}:
        return list(recorded)
    texts = (64, 224) if len({point[T] for point in recorded}) > 1 else (recorded[0][T],)
    sizes = [*itertools.product((1, 2), (4096, 5120, 7168), texts), (4, 4096, sum(texts))]
    return [{B: batch, S: tokens, T: text} for batch, tokens, text in sizes]


class Flash(torch.autograd.Function):
    """The shape and the saved tensors of a fused attention; computes nothing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        alike = query.shape[-1] == value.shape[-1]
        out = torch.empty_like(query) if alike else query.new_empty((*query.shape[:-1], value.shape[-1]))
        ctx.save_for_backward(query, key, value, out, query.new_empty(query.shape[:-1], dtype=torch.float32), mask)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError("only what is saved is measured")


class FusedRmsNorm(torch.autograd.Function):
    """The shape and the saved tensors of a GPU's RMS norm; computes nothing."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, dims: int, weight: Tensor | None) -> Tensor:
        rows = value.new_empty((*value.shape[: value.dim() - dims], *[1] * dims), dtype=torch.float32)
        ctx.save_for_backward(value, rows, weight)
        return torch.empty_like(value)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError("only what is saved is measured")


class _Meta(fx.Interpreter):
    """Runs a graph on meta tensors, attention without the quadratic fallback that the meta device would take.

    ``results`` are each node's tensors, all kept, so that no storage's address is used twice.
    """

    def __init__(self, module: fx.GraphModule, gpu: bool) -> None:
        super().__init__(module)
        self.gpu = gpu
        self.results: dict[fx.Node, list[Tensor]] = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        with torch.fx.experimental._config.patch(meta_nonzero_assume_all_nonzero=True):  # type: ignore[attr-defined]
            return super().run(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function" and n.target is SDPA:
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            given = [*args, *[None] * 4][3]
            result = Flash.apply(*args[:3], kwargs.get("attn_mask", given))  # type: ignore[no-untyped-call]
        elif self.gpu and n.op == "call_function" and n.target is RMS_NORM and _is_fused(*self._norm(n)):
            result = FusedRmsNorm.apply(*self._norm(n))  # type: ignore[no-untyped-call]
        else:
            if "device" in n.kwargs:
                n.update_kwarg("device", torch.device("meta"))
            result = super().run_node(n)
        self.results[n] = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        return result

    def _norm(self, n: fx.Node) -> tuple[Tensor, int, Tensor | None]:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        return args[0], len(args[1]), kwargs.get("weight", [*args, None][2])


def _is_fused(value: Tensor, dims: int, weight: Tensor | None) -> bool:
    """torch has no kernel for a weight of another precision."""
    return weight is None or weight.dtype == value.dtype


def _arguments(captured: CapturedBlock, point: Point) -> list[Tensor]:
    nodes = [node for node in captured.exported.graph.nodes if node.op == "placeholder"]
    arguments = []
    for node, slot in zip(nodes, captured.slots, strict=True):
        value = node.meta["val"]
        shape = [int(size if size.is_Integer else size.subs(point)) for size in captured.dims(node)]
        wants = value.requires_grad if slot.kind == "parameter" else False
        if isinstance(slot.target, int):
            wants = captured.input_grads[slot.target]
        arguments.append(torch.empty(shape, dtype=value.dtype, device="meta", requires_grad=bool(wants)))
    return arguments


def _measured(
    captured: CapturedBlock, graph: fx.GraphModule, point: Point, chained: Sequence[bool], gpu: bool
) -> tuple[int, int, int]:
    """Bytes of distinct storages that autograd keeps: made in the block or by the one before; given to all blocks.
    Then what is alive at most while nothing is kept."""
    arguments = _arguments(captured, point)
    links = iter(chained)
    kinds = {
        storage_of(argument): ("parameter" if slot.kind != "input" else "chained" if next(links) else "shared")
        for argument, slot in zip(arguments, captured.slots, strict=True)
    }
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[storage_of(tensor)] = tensor
        return tensor

    run = _Meta(graph, gpu)
    with saved_tensors_hooks(pack, lambda tensor: tensor), torch.enable_grad():
        run.run(*arguments)
    own = sum(t.untyped_storage().nbytes() for key, t in kept.items() if kinds.get(key, "chained") == "chained")
    shared = sum(t.untyped_storage().nbytes() for key, t in kept.items() if kinds.get(key) == "shared")
    return own, shared, _peak(run.results)


def _on_meta(captured: CapturedBlock) -> fx.GraphModule:
    """A copy, since constants of the graph that name a device are changed to the meta device."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(captured.graph_module.graph, {}))
    return fx.GraphModule(captured.graph_module, copy)


def _peak(results: Mapping[fx.Node, Sequence[Tensor]]) -> int:
    """The most bytes of intermediates alive at once, each freed after its last use; views keep what they view.

    ``results`` are those of all nodes in order.
    """
    position = {node: i for i, node in enumerate(results)}
    given = {storage_of(x) for node, tensors in results.items() if node.op == "placeholder" for x in tensors}
    birth: dict[int, int] = {}
    death: dict[int, int] = {}
    size: dict[int, int] = {}
    for node, tensors in results.items():
        if node.op == "output":
            continue
        last = max((position[user] for user in node.users if user in position), default=position[node])
        for key, count in ((storage_of(x), x.untyped_storage().nbytes()) for x in tensors):
            if key not in given:
                birth.setdefault(key, position[node])
                death[key] = max(death.get(key, position[node]), last)
                size[key] = count
    return max((sum(size[k] for k in size if birth[k] <= i <= death[k]) for i in range(len(results))), default=0)
