"""A region of which hand-written kernels compute a part: what lies between their calls becomes generated kernels."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.fx.passes.utils.fuser_utils import fuse_by_partitions

from arachnec.codegen.fused_members import is_number, is_view
from arachnec.codegen.triton.region import Generated


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
