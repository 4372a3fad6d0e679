"""A captured block that runs its fused regions as one call each.

A region that a hand-written kernel computes calls it where there is a CUDA device; what is left of a region becomes a
module of its own, compiled once for all shapes by Inductor (C++ on a CPU, Triton on CUDA). Gradients are those of the
region's own operations, or the kernel's.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.passes.utils.fuser_utils import fuse_by_partitions

from arachnec.backends.fused_kernels import KERNELS, Kernel
from arachnec.ir.nodes import Fused, Graph
from arachnec.passes.fuse_graph import FusionGraph
from arachnec.passes.fuse_match import Match, match_region
from arachnec.passes.shape_constraints import constraints_of
from arachnec.passes.trace_captured import CapturedBlock, CapturedModel, lifted
from arachnec.passes.trace_graph import node_names

# What a compiled region must save on a CPU before it is faster than eager, measured by benchmarks/fused_regions_cpu.py:
# regions of two or three operations gain nothing, and small ones lose to the guards in front of the compiled code.
FEWEST = 4  # operations
WORTH_COMPILING = 4 << 20  # bytes of input, times operations


class Region(nn.Module):
    """The operations of one region. ``compiled`` is used on CUDA, and on a CPU where there is enough to do."""

    def __init__(self, name: str, eager: fx.GraphModule, compiled: Callable[..., Any] | None) -> None:
        super().__init__()
        self.name, self.eager, self._compiled = name, eager, compiled
        self._operations = sum(not _is_view(node) for node in eager.graph.nodes if node.op == "call_function")

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


def fuse_block(
    captured: CapturedBlock,
    graph: Graph,
    *,
    kernels: bool | None = None,
    compiler: Callable[[fx.GraphModule], Callable[..., Any]] | None = None,
) -> fx.GraphModule:
    """The graph of ``captured`` with every region of ``graph`` (its IR, after ``fuse``) as one call.

    Its placeholders and outputs are those of ``captured.graph_module``. ``kernels`` says whether hand-written kernels
    are called; by default where there is a CUDA device. ``compiler`` turns a region into what runs it; by default
    ``torch.compile`` for all shapes, where there is a compiler for it, and nothing (eager) else.
    """
    use_kernels = torch.cuda.is_available() if kernels is None else kernels
    compiler = compiler or default_compiler()
    fused = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result = fused.graph_copy(captured.graph_module.graph, copies)
    fused.output(result)
    nodes = {name: copies[node] for node, name in node_names(captured).items() if node in copies}
    module = fx.GraphModule(captured.graph_module, fused)
    known = FusionGraph(graph, constraints_of(graph))
    learned = _learned(captured, copies)
    partitions: list[tuple[str, dict[fx.Node, int | None]]] = []
    for region in graph.fused:
        members = [nodes[name] for name in region.ops]
        if use_kernels:
            members = _with_kernels(fused, known, region, nodes, members, learned)
        if sum(not _is_view(node) for node in members) > 1:
            partitions.append((region.name, dict.fromkeys(_with_sizes(members))))
    module = fuse_by_partitions(module, [members for _, members in partitions])
    for number, (name, _) in enumerate(partitions):
        _replace(module, f"fused_{number}", name, compiler)
    module.graph.lint()
    module.recompile()
    return module


def default_compiler() -> Callable[[fx.GraphModule], Callable[..., Any]] | None:
    """``torch.compile`` with symbolic sizes where Inductor finds what it needs: a GPU, or a C++ compiler."""
    if torch.cuda.is_available() or shutil.which("g++") or shutil.which("clang++"):
        return partial(torch.compile, dynamic=True, fullgraph=True)
    return None


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


def _is_view(node: fx.Node) -> bool:
    from arachnec.ir.nodes import GraphOp
    from arachnec.passes.fuse_ops import Kind, kind_of

    if getattr(node.target, "__name__", "") == "getitem" or not isinstance(node.meta.get("val"), Tensor | tuple | list):
        return True
    return kind_of(GraphOp("", str(node.target), (), None)) is Kind.VIEW


def _with_sizes(members: Sequence[fx.Node]) -> list[fx.Node]:
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
        if node in below and node not in extra:
            extra.add(node)
            front.extend(node.all_input_nodes)
    return [*members, *extra]


# hand-written kernels


def _with_kernels(
    graph: fx.Graph,
    known: FusionGraph,
    region: Fused,
    nodes: dict[str, fx.Node],
    members: list[fx.Node],
    learned: set[fx.Node],
) -> list[fx.Node]:
    """The region's nodes after what its matches stand for was replaced by calls."""
    mask = sum(1 << known.index[name] for name in region.ops)
    for match in match_region(known, mask):
        kernel = KERNELS[match.kernel]
        if any(nodes[match.operands[role]] in learned for role in kernel.constant):
            continue
        gone = [nodes[known.ops[i].name] for i in range(len(known.ops)) if match.ops >> i & 1]
        made = _call(graph, match, kernel, nodes)
        for role, name in match.results.items():
            nodes[name].replace_all_uses_with(made[role])
            nodes[name] = made[role]
        for node in reversed(gone):
            if not node.users:
                graph.erase_node(node)
        members = [node for node in members if node not in gone] + list(made["calls"])
    return members


def _learned(captured: CapturedBlock, copies: Mapping[fx.Node, fx.Node]) -> set[fx.Node]:
    """The nodes whose values depend on what is trained."""
    placeholders = [node for node in captured.exported.graph.nodes if node.op == "placeholder"]
    found: set[fx.Node] = set()
    for node, slot in zip(placeholders, captured.slots, strict=True):
        if slot.kind == "parameter" or (isinstance(slot.target, int) and captured.input_grads[slot.target]):
            found.add(copies[node])
    for node in captured.exported.graph.nodes:
        if any(copies.get(before) in found for before in node.all_input_nodes) and node in copies:
            found.add(copies[node])
    return found


def _call(graph: fx.Graph, match: Match, kernel: Kernel, nodes: Mapping[str, fx.Node]) -> dict[str, Any]:
    """Nodes that call the kernel: ``calls``, and one for each result."""
    returned = kernel.returns
    arguments: dict[str, Any] = {role: nodes[name] for role, name in match.operands.items()}
    arguments |= match.options
    last = max((nodes[name] for name in match.results.values()), key=_position(graph))
    value = {role: nodes[name].meta for role, name in match.results.items()}
    with graph.inserting_after(last):
        call = graph.call_function(kernel.call, (), arguments)
    call.meta = {"val": value[returned[0]]["val"] if len(returned) == 1 else tuple(value[r]["val"] for r in returned)}
    if len(returned) == 1:
        return {returned[0]: call, "calls": [call]}
    made: dict[str, Any] = {"calls": [call]}
    for index, role in reversed(list(enumerate(returned))):
        with graph.inserting_after(call):
            made[role] = graph.call_function(_item, (call, index))
        made[role].meta = dict(value[role])
        made["calls"].append(made[role])
    return made


def _item(values: tuple[Tensor, ...], index: int) -> Tensor:
    return values[index]


_item.__name__ = "getitem"


def _position(graph: fx.Graph) -> Callable[[fx.Node], int]:
    order = {node: number for number, node in enumerate(graph.nodes)}
    return order.__getitem__


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
