"""Blocks of a model as the executable has fused them. In: graphs after ``fuse``. Out: what a block runs instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from arachnec.ir.nodes import Graph

if TYPE_CHECKING:
    from arachnec.spmd.rewrite import ShardedBlock
    from arachnec.spmd.sharded_model import FusedForms


def fuse_as_planned(planned: Sequence[Graph], **how: Any) -> Callable[[ShardedBlock], FusedForms]:
    """Fused forms of each block with the regions of its graph in ``planned``; ``how`` as in ``fuse_module``.

    In another precision than the one that was planned for there are other casts: then the regions are found again.
    """
    from arachnec.codegen.fused_block import fuse_block, fuse_sharded
    from arachnec.fusion.fused_graph import fuse_graph
    from arachnec.spmd.sharded_model import FusedForms
    from arachnec.tracing.graph import block_graph

    def fused(block: ShardedBlock) -> FusedForms:
        graph = block_graph(block.captured)
        same = (plan for plan in planned if (plan.inputs, plan.ops) == (graph.inputs, graph.ops))
        graph = next(same, None) or fuse_graph(graph)
        return FusedForms(fuse_block(block.captured, graph, **how), fuse_sharded(block, graph, **how))

    return fused
