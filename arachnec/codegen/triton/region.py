"""A region as generated Triton kernels, forward and backward, between hand-written ones that compute parts of it.

The backward is PyTorch's own derivative of the region's operations, traced with symbolic sizes; it computes again what
it needs from the region's inputs, so that nothing else is saved. What is left after a sum over rows (a few vectors)
runs as plain operations.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.utils.fuser_utils import fuse_by_partitions

from arachnec.codegen.fused_calls import is_number, is_view
from arachnec.codegen.triton.index import Unsupported
from arachnec.codegen.triton.plan import stage_of

aten, prims = torch.ops.aten, torch.ops.prims


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Operations that templates do not know, in terms of those they do."""
    from torch._decomp import core_aten_decompositions, get_decompositions

    names = """native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward rms_norm var_mean
        gelu gelu_backward silu silu_backward mish mish_backward softplus softplus_backward leaky_relu
        leaky_relu_backward elu elu_backward hardswish hardswish_backward hardsigmoid hardsigmoid_backward hardtanh
        hardtanh_backward glu glu_backward threshold_backward tanh_backward sigmoid_backward log_sigmoid_forward
        log_sigmoid_backward addcmul addcdiv lerp masked_fill square _softmax _log_softmax _softmax_backward_data
        _log_softmax_backward_data std_mean rsub native_group_norm arange"""
    own = {aten.mean.dim: _mean, aten.mean.default: _mean, prims.var.default: _variance,
           aten.var.correction: _variance_of, aten.std.correction: _deviation}  # fmt: skip
    return {**core_aten_decompositions(), **get_decompositions([getattr(aten, n) for n in names.split()]), **own}


def _count(x: Tensor, dims: Sequence[int] | None) -> int:
    """How many elements a reduction runs over, which may be a symbol."""
    return math.prod(x.shape[dim] for dim in dims or range(x.ndim))


def _sum(x: Tensor, dims: Sequence[int] | None, keepdim: bool) -> Tensor:
    return x.sum(tuple(dims or range(x.ndim)), keepdim)


def _mean(
    x: Tensor, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    wide = x.to(torch.promote_types(dtype or x.dtype, torch.float32))
    return (_sum(wide, dim, keepdim) / _count(x, dim)).to(dtype or x.dtype)


def _variance(
    x: Tensor, dims: Sequence[int] | None, correction: float | None = 1, *, keepdim: bool = False, **_: Any
) -> Tensor:
    center = _sum(x, dims, True) / _count(x, dims)
    squares = _sum((x - center).square(), dims, keepdim)
    return squares / (_count(x, dims) - int(1 if correction is None else correction))


def _variance_of(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    return _variance(x, dim, correction, keepdim=keepdim)


def _deviation(
    x: Tensor, dim: Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    return _variance(x, dim, correction, keepdim=keepdim).sqrt()


class Generated:
    """Stands for a region: a callable of its inputs. Raises ``Unsupported`` when made, never when called."""

    def __init__(self, region: fx.GraphModule) -> None:
        placeholders = [node for node in region.graph.nodes if node.op == "placeholder"]
        fakes = [node.meta["val"] for node in placeholders]
        if not all(isinstance(fake, Tensor | torch.SymInt | int) for fake in fakes):
            raise Unsupported("an input is no tensor")
        learned = [node.meta.get("learned", True) for node in placeholders]
        floating = [isinstance(fake, Tensor) and fake.is_floating_point() for fake in fakes]
        self._region = region
        self._places = tuple(i for i, pair in enumerate(zip(floating, learned, strict=True)) if all(pair))
        results = region.graph.output_node().args[0]
        self._single = not isinstance(results, tuple | list)
        forward, backward = _traced(region, fakes, self._places)
        self.forward, self.backward = stage_of(forward, "forward"), stage_of(backward, "backward")
        stage, places = self, self._places

        class Region(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *values: Any) -> tuple[Tensor, ...]:
                ctx.numbers = [None if isinstance(v, Tensor) else v for v in values]
                ctx.save_for_backward(*(v for v in values if isinstance(v, Tensor)))
                return stage.forward(values)

            @staticmethod
            def backward(ctx: Any, *tangents: Tensor) -> tuple[Any, ...]:
                saved = iter(ctx.saved_tensors)
                values = [next(saved) if number is None else number for number in ctx.numbers]
                gradients: list[Any] = [None] * len(values)
                for place, gradient in zip(places, stage.backward([*values, *tangents]), strict=True):
                    gradients[place] = gradient
                return tuple(gradients)

        self._function = Region

    def __call__(self, *values: Any) -> Any:
        others = (v for i, v in enumerate(values) if i not in self._places)
        if any(isinstance(v, Tensor) and v.requires_grad for v in others):
            return self._region(*values)  # more is trained than when the block was captured
        results = self._function.apply(*values)  # type: ignore[no-untyped-call]
        return results[0] if self._single else results


def _traced(region: fx.GraphModule, fakes: Sequence[Any], places: Sequence[int]) -> tuple[fx.GraphModule, ...]:
    """The region, and its derivative as a function of its inputs and of its results' gradients."""

    def forward(*values: Any) -> tuple[Tensor, ...]:
        results = region(*values)
        return tuple(results) if isinstance(results, tuple | list) else (results,)

    def backward(*values: Any) -> tuple[Tensor | None, ...]:
        given = [v.detach().requires_grad_() if i in places else v for i, v in enumerate(values[: len(fakes)])]
        results = forward(*given)
        wanted = [given[i] for i in places]
        if not places:
            return ()
        pairs = [(r, t) for r, t in zip(results, values[len(fakes) :], strict=True) if r.requires_grad]
        outputs, tangents = zip(*pairs, strict=True)
        return torch.autograd.grad(outputs, wanted, tangents, allow_unused=True)

    mode = next(fake.fake_mode for fake in fakes if isinstance(fake, Tensor))  # type: ignore[attr-defined]
    with mode, torch.enable_grad():
        traced = _trace(forward, fakes)
        results = [node.meta["val"] for node in traced.graph.output_node().args[0]]  # type: ignore[union-attr]
        tangents = [torch.empty_like(result) for result in results]
        return traced, _trace(backward, [*fakes, *tangents])


def _trace(function: Callable[..., Any], fakes: Sequence[Any]) -> fx.GraphModule:
    traced = make_fx(function, decomposition_table=decompositions())(*fakes)
    for node in traced.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise Unsupported(f"`{node.target}` is random")
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            _without_mutation(traced.graph, node)
    traced.graph.eliminate_dead_code()
    return traced


def _without_mutation(graph: fx.Graph, node: fx.Node) -> None:
    """``add_`` of a temporary as ``add``, where nobody reads the temporary again."""
    target = node.args[0]
    assert isinstance(target, fx.Node)
    packet = getattr(aten, str(node.target.overloadpacket.__name__).rstrip("_"), None)  # type: ignore[union-attr]
    overload = None if packet is None else getattr(packet, node.target._overloadname, None)  # type: ignore[union-attr]
    if overload is None or set(target.users) != {node} or target.op == "placeholder":
        raise Unsupported(f"`{node.target}` writes into a tensor that others read")
    node.target = overload


class Piece(nn.Module):
    """Stands in the region's graph for what ``run`` computes."""

    def __init__(self, run: Generated) -> None:
        super().__init__()
        self.run = run

    def forward(self, *values: Any) -> Any:
        return self.run(*values)


def generated(region: fx.GraphModule) -> Callable[..., Any]:
    """The region in generated kernels, around the calls that are in it. Raises ``Unsupported``."""
    calls = {node for node in region.graph.nodes if is_call(node)}
    if not calls:
        return Generated(region)
    copied: fx.GraphModule = copy.deepcopy(region)
    pieces = [piece for piece in _between(copied) if sum(not is_view(node) for node in piece) > 0]
    fuse_by_partitions(copied, [dict.fromkeys(piece) for piece in pieces])
    for number in range(len(pieces)):
        piece = copied.get_submodule(f"fused_{number}")
        assert isinstance(piece, fx.GraphModule)
        copied.set_submodule(f"fused_{number}", Piece(Generated(piece)))
    copied.recompile()
    return copied


def is_call(node: fx.Node) -> bool:
    """Whether a node is no operation of torch's: a kernel, or a part of what it gives."""
    target: Any = node.target
    if node.op != "call_function" or isinstance(target, torch._ops.OpOverload):
        return False
    return getattr(target, "__module__", "") != "_operator"


def _between(module: fx.GraphModule) -> list[list[fx.Node]]:
    """The operations with equally many calls above them: no way from one to another goes through a call."""
    above: dict[fx.Node, int] = {}
    pieces: dict[int, list[fx.Node]] = {}
    for node in module.graph.nodes:
        above[node] = max((above[x] + is_call(x) for x in node.all_input_nodes), default=0)
        if node.op == "call_function" and not is_call(node) and not is_number(node):
            pieces.setdefault(above[node], []).append(node)
    return list(pieces.values())
