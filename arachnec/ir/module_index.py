"""The names of a module, and what messages call its nodes."""

from __future__ import annotations

from dataclasses import dataclass

from arachnec.ir.nodes import Cascade, Clip, Cluster, Fused, Graph, Instruction, Module, Program, Reduce, Stage, Step
from arachnec.ir.printer import percent, symbol


@dataclass(frozen=True)
class ModuleIndex:
    """A module and its nodes by name."""

    module: Module
    stages: dict[str, Stage]
    clips: dict[int, Clip]
    cascades: dict[str, Cascade]
    graphs: dict[str, Graph]


def index_of(module: Module) -> ModuleIndex:
    return ModuleIndex(
        module,
        {stage.name: stage for stage in module.stages},
        {clip.id: clip for clip in module.clips},
        {cascade.name: cascade for cascade in module.cascades},
        {graph.name: graph for graph in module.graphs},
    )


def label(node: object) -> str:
    """A node as messages call it: ``stage `@dit```, ``cascade `%1```."""
    if isinstance(node, Cascade):
        return f"cascade `{percent(node.name)}`"
    if isinstance(node, Clip):
        return f"clip {node.id}"
    if isinstance(node, Program):
        return f"the program of rank {node.rank}"
    if isinstance(node, Instruction):
        return f"`{node.op} {symbol(node.target) if node.op in ('reduce', 'step') else percent(node.target)}`"
    if isinstance(node, Reduce | Step):
        return f"`{type(node).__name__.lower()} {symbol(node.stage)}`"
    if isinstance(node, Module | Cluster | Stage | Graph | Fused):
        return f"{type(node).__name__.lower()} `{symbol(node.name)}`"
    raise TypeError(f"not a node: {node!r}")
