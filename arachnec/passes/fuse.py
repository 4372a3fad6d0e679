"""Find the memory-intensive operations of each block's graph that are worth one kernel, and write them into the graph.

FusionStitching (arXiv 2009.10924) for symbolic shapes as in DISC (2103.05288); ``docs/fusion.md`` says how. Nothing is
looked up by the name of a model: regions are found, and then compared with what the hand-written kernels compute.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from arachnec.cluster.device_specs import find_device_specs
from arachnec.ir.nodes import Level, Module
from arachnec.passes.infra.base import Pass, Scope


@dataclass(frozen=True)
class Fuse(Pass):
    """Group the memory-intensive operations of every graph into regions that run as one kernel."""

    needs: ClassVar[Level] = Level.TRACED
    gives: ClassVar[Level] = Level.TRACED
    scope: ClassVar[Scope] = Scope.MODEL

    def run(self, module: Module) -> Module:
        from arachnec.fusion.fused_graph import fuse_graph
        from arachnec.fusion.shape_constraints import likely_sizes

        likely = likely_sizes(module)
        specs = None if module.cluster is None else find_device_specs(str(module.cluster.attrs.get("device", "")))
        bandwidth = None if specs is None else specs.bandwidth * 1e9
        return replace(module, graphs=tuple(fuse_graph(graph, likely, bandwidth) for graph in module.graphs))
