"""A captured block that runs its fused regions as one call each.

A region that a hand-written kernel computes calls it where there is a CUDA device; what is left of a region becomes a
module of its own, compiled once for all shapes by Inductor (C++ on a CPU, Triton on CUDA). Gradients are those of the
region's own operations, or the kernel's.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.utils.fuser_utils import fuse_by_partitions

from arachnec.codegen.fused_calls import KernelCalls, convex, is_view, learned_nodes, with_sizes
from arachnec.fusion.graph import FusionGraph
from arachnec.fusion.shape_constraints import constraints_of
from arachnec.ir.nodes import Graph
from arachnec.spmd.rewrite import ShardedBlock
from arachnec.tracing.captured import CapturedBlock, CapturedModel, lifted
from arachnec.tracing.graph import node_names

if TYPE_CHECKING:
    from arachnec.spmd.sharded_model import FusedForms


# What a compiled region must save on a CPU before it is faster than eager, measured by benchmarks/fused_regions_cpu.py:
# regions of two or three operations gain nothing, and small ones lose to the guards in front of the compiled code.
FEWEST = 4  # operations
WORTH_COMPILING = 4 << 20  # bytes of input, times operations


class Region(nn.Module):
    """The operations of one region. ``compiled`` is used on CUDA, and on a CPU where there is enough to do."""

    def __init__(self, name: str, eager: fx.GraphModule, compiled: Callable[..., Any] | None) -> None:
        super().__init__()
        self.name, self.eager, self._compiled = name, eager, compiled
        self._operations = sum(not is_view(node) for node in eager.graph.nodes if node.op == "call_function")

    def forward(self, *values: Any) -> Any:
        if self._compiled is not None and self._is_worth_it(values):
            return self._compiled(*values)
        return self.eager(*values)

    def _is_worth_it(self, values: Sequence[Any]) -> bool:
        tensors = [value for value in values if isinstance(value, Tensor)]
        if any(tensor.is_cuda for tensor in tensors):
            return True
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return self._operations >= FEWEST and size * self._operations >= WORTH_COMPILING


def fuse_block(captured: CapturedBlock, graph: Graph, **how: Any) -> fx.GraphModule:
    """The graph of ``captured`` with every region of ``graph`` (its IR, after ``fuse``) as one call.

    Its placeholders and outputs are those of ``captured.graph_module``; ``how`` as in ``fuse_module``.
    """
    module = captured.graph_module
    return fuse_module(module, {node: node for node in module.graph.nodes}, captured, graph, **how)


def fuse_module(
    module: fx.GraphModule,
    counterparts: Mapping[fx.Node, fx.Node],
    captured: CapturedBlock,
    graph: Graph,
    *,
    kernels: bool | None = None,
    compiler: Callable[[fx.GraphModule], Callable[..., Any]] | None = None,
) -> fx.GraphModule:
    """``module`` with the regions of ``graph`` as calls; ``counterparts`` are the captured nodes' in ``module``.

    ``kernels`` says whether hand-written kernels are called; by default where there is a CUDA device. ``compiler``
    turns a region into what runs it; by default ``torch.compile`` for all shapes, where there is a compiler for it, and
    nothing (eager) else.
    """
    use_kernels = torch.cuda.is_available() if kernels is None else kernels
    compiler = compiler or default_compiler()
    fused = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    fused.output(fused.graph_copy(module.graph, copies))
    here = {node: copies[other] for node, other in counterparts.items() if other in copies}
    for node, copy in here.items():
        copy.meta.setdefault("val", node.meta.get("val"))
    names = {name: node for node, name in node_names(captured).items()}
    nodes = {name: here[node] for name, node in names.items() if node in here}
    intact = {name for name, node in names.items() if node in here and here[node].target == node.target}
    known, learned = FusionGraph(graph, constraints_of(graph)), learned_nodes(captured, here)
    for node in fused.nodes:
        node.meta["learned"] = node in learned
    calls = KernelCalls(fused, known, names, nodes, intact, learned)
    partitions: list[tuple[str, dict[fx.Node, int | None]]] = []
    result = fx.GraphModule(module, fused)
    for region in graph.fused:
        members = [nodes[name] for name in region.ops if name in intact]
        parts = [convex(with_sizes(part)) for part in (calls.put(region, members) if use_kernels else [members])]
        parts = [part for part in parts if sum(not is_view(node) for node in part) > 1]
        for number, part in enumerate(parts):
            name = region.name if len(parts) == 1 else f"{region.name}_part_{number}"
            partitions.append((name, dict.fromkeys(part)))
    result = fuse_by_partitions(result, [members for _, members in partitions])
    for number, (name, _) in enumerate(partitions):
        _replace(result, f"fused_{number}", name, compiler)
    result.graph.lint()
    result.recompile()
    return result


def default_compiler() -> Callable[[fx.GraphModule], Callable[..., Any]] | None:
    """Generated Triton on a GPU; ``torch.compile`` with symbolic sizes on a CPU where Inductor finds a C++ compiler."""
    if torch.cuda.is_available():
        return generated_or_compiled
    if shutil.which("g++") or shutil.which("clang++"):
        return _compiled
    return None


def generated_or_compiled(region: fx.GraphModule) -> Callable[..., Any]:
    """The region in Triton by our templates, or, where they do not cover it, by Inductor's."""
    from arachnec.codegen.triton.index import Unsupported
    from arachnec.codegen.triton.region import generated

    try:
        return generated(region)
    except Unsupported:
        return _compiled(region)


def _compiled(region: fx.GraphModule) -> Callable[..., Any]:
    return torch.compile(region, dynamic=True, fullgraph=True)


def _replace(
    module: fx.GraphModule, target: str, name: str, compiler: Callable[[fx.GraphModule], Callable[..., Any]] | None
) -> None:
    """Put the region in the place of its bare operations."""
    eager = module.get_submodule(target)
    assert isinstance(eager, fx.GraphModule)
    (call,) = (node for node in module.graph.nodes if node.op == "call_module" and node.target == target)
    module.add_submodule(name, Region(name, eager, None if compiler is None else compiler(eager)))
    call.target = name
    module.delete_submodule(target)


# in a model


@contextmanager
def fused_blocks(model: nn.Module, captured: CapturedModel, graphs: Sequence[Graph], **how: Any) -> Iterator[nn.Module]:
    """``model`` with the forward of every captured block replaced by its fused graph; undone at the end.

    ``graphs`` are the blocks' graphs after ``fuse``, by name; ``how`` as in ``fuse_block``.
    """
    plans = {graph.name: graph for graph in graphs}
    replaced: list[nn.Module] = []
    try:
        for block in captured.blocks:
            module = fuse_block(block, plans[block.name], **how)
            for path in block.instances:
                instance = model.get_submodule(path)
                instance.forward = _forward(block, instance, module)
                replaced.append(instance)
        yield model
    finally:
        for instance in replaced:
            del instance.__dict__["forward"]


def _forward(captured: CapturedBlock, instance: nn.Module, module: fx.GraphModule) -> Callable[..., Any]:
    run = lifted(captured, instance, module)

    @wraps(instance.forward)  # whose signature says how arguments are to be read
    def forward(*args: Any, **kwargs: Any) -> Any:
        return captured.unflatten(run(*captured.flatten(instance, args, kwargs)))

    return forward


def fuse_as_planned(planned: Sequence[Graph], **how: Any) -> Callable[[ShardedBlock], FusedForms]:
    """Fused forms of each block with the regions of its graph in ``planned``; ``how`` as in ``fuse_module``.

    In another precision than the one that was planned for there are other casts: then the regions are found again.
    """
    from arachnec.fusion.fused_graph import fuse_graph
    from arachnec.spmd.sharded_model import FusedForms
    from arachnec.tracing.graph import block_graph

    def fused(block: ShardedBlock) -> FusedForms:
        graph = block_graph(block.captured)
        same = (plan for plan in planned if (plan.inputs, plan.ops) == (graph.inputs, graph.ops))
        graph = next(same, None) or fuse_graph(graph)
        # a rank's share fuses as the whole block: attention, and what moves tokens between ranks, is in no region
        share = fuse_module(block.module, block.counterparts, block.captured, graph, **how)
        return FusedForms(fuse_block(block.captured, graph, **how), share)

    return fused
