"""A region as a function that runs generated Triton kernels, forward and backward.

The backward is PyTorch's own derivative of the region's operations, traced with symbolic sizes; it computes again what
it needs from the region's inputs, so that nothing else is saved. What is left after a sum over rows (a few vectors)
runs as plain operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from arachnec.backends.generated_index import Unsupported
from arachnec.backends.generated_kernel import Launcher
from arachnec.backends.generated_operations import lead_dims, sums_rows
from arachnec.backends.generated_source import write_source

aten = torch.ops.aten


@functools.cache
def decompositions() -> dict[Any, Callable[..., Any]]:
    """Operations that templates do not know, in terms of those they do."""
    from torch._decomp import core_aten_decompositions, get_decompositions

    more = (aten.native_layer_norm, aten.native_layer_norm_backward, aten._fused_rms_norm,
            aten._fused_rms_norm_backward, aten.rms_norm, aten.var_mean, aten.gelu, aten.gelu_backward, aten.silu,
            aten.silu_backward, aten.addcmul, aten.mean.dim, aten.native_dropout)  # fmt: skip
    return {**core_aten_decompositions(), **get_decompositions(more)}


@dataclass(frozen=True, eq=False)
class Stage:
    """Forward or backward: kernels write ``stores`` and sum ``columns``; ``tail`` makes the outputs of all."""

    launcher: Launcher | None
    tail: fx.GraphModule

    def __call__(self, values: Sequence[Any]) -> tuple[Any, ...]:
        made = () if self.launcher is None else self.launcher(values)
        return tuple(self.tail(*values, *made))


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
        self._places = tuple(i for i, found in enumerate(zip(floating, learned, strict=True)) if all(found))
        results = region.graph.output_node().args[0]
        self._single = not isinstance(results, tuple | list)
        forward, backward = _traced(region, fakes, self._places)
        self.forward, self.backward = _stage(forward, "forward"), _stage(backward, "backward")
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
                found: list[Any] = [None] * len(values)
                for place, gradient in zip(places, stage.backward([*values, *tangents]), strict=True):
                    found[place] = gradient
                return tuple(found)

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


def _stage(graph_module: fx.GraphModule, name: str) -> Stage:
    graph = graph_module.graph
    results: list[fx.Node | None] = list(graph.output_node().args[0])  # type: ignore[arg-type]
    sums = [node for node in graph.nodes if node.op == "call_function" and sums_rows(node)]
    after: set[fx.Node] = set(sums)
    for node in graph.nodes:
        if node.op != "output" and any(before in after for before in node.all_input_nodes):
            after.add(node)
    given = {result: _identity(result) for result in results if result is not None}
    stores = list(dict.fromkeys(r for r, source in given.items() if r not in after and source is None))
    needed = _above([r for r in results if r in after])
    sums = [node for node in sums if node in needed]
    made = [*stores, *sums]
    launcher = Launcher(graph_module, stores, sums, write_source, name) if made else None
    return Stage(launcher, _tail(graph, results, given, made))


def _identity(node: fx.Node) -> fx.Node | None:
    """The input that a result is, if it is one."""
    while node.target in (aten.alias.default, aten.detach.default) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node if node.op == "placeholder" else None


def _above(nodes: Sequence[fx.Node | None]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    front = [node for node in nodes if node is not None]
    while front:
        node = front.pop()
        if node not in found:
            found.add(node)
            front.extend(node.all_input_nodes)
    return found


def _tail(
    graph: fx.Graph, results: Sequence[fx.Node | None], given: dict[fx.Node, fx.Node | None], made: Sequence[fx.Node]
) -> fx.GraphModule:
    """Inputs and what the kernel made, to the outputs."""
    lead = max(
        (lead_dims(node.all_input_nodes[0].meta["val"]) for node in made if sums_rows(node)), key=len, default=()
    )

    def is_row(node: fx.Node) -> bool:
        value = node.meta.get("val")
        return isinstance(value, Tensor) and bool(lead) and lead_dims(value) == lead

    tail = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            known[node] = tail.placeholder(node.name)
    for number, node in enumerate(made):
        known[node] = tail.placeholder(f"made_{number}")

    def copied(node: fx.Node) -> fx.Node:
        if node not in known:
            if is_row(node):
                raise Unsupported(f"`{node.name}` is needed beside a sum over rows")
            for before in node.all_input_nodes:
                copied(before)
            known[node] = tail.node_copy(node, known.__getitem__)
        return known[node]

    outputs = []
    for result in results:
        source = None if result is None else given[result]
        outputs.append(None if result is None else copied(result if source is None else source))
    tail.output(tuple(outputs))
    return fx.GraphModule(torch.nn.Module(), tail)
