"""The model's blocks, traced and replaced, once some program needs them on several ranks or computed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from arachnec.backends.cast_samples import CastSamples
from arachnec.backends.torch_distributed.interpreter import SequenceParallel, needs_sequence
from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Graph, Module
from arachnec.models.file import ModelFile
from arachnec.tracing.errors import cannot_on_meta

if TYPE_CHECKING:
    from arachnec.spmd.block_forward import FusedForms
    from arachnec.spmd.rewrite import ShardedBlock
    from arachnec.tracing.captured import CapturedModel


@dataclass
class Sequences:
    """Traces at the first program that cannot do without: a model that runs whole on each rank never is.

    With ``planned`` graphs, those of the executable after ``fuse``, always: then every block runs its fused graph.
    """

    model_file: ModelFile
    model: nn.Module
    clips: Sequence[VideoClip]
    dtype: torch.dtype | None  # what floating-point arguments are cast to
    shapes: Callable[[], nn.Module]  # the same model on the meta device
    planned: Sequence[Graph] = ()
    _installed: list[SequenceParallel] = field(default_factory=list)

    def for_program(self, module: Module) -> SequenceParallel | None:
        """The model in its sequence-parallel form if it has one by now; made if ``module`` needs it."""
        if not self._installed and (self.planned or needs_sequence(module)):
            self._installed.append(self._install())
        return self._installed[0] if self._installed else None

    def _install(self) -> SequenceParallel:
        from arachnec.spmd.sharded_model import install

        return install(self.model, self._captured(), fuse_as_planned(self.planned) if self.planned else None)

    def _captured(self) -> CapturedModel:
        """Recorded without values, as ``trace`` does. Compared with eager at a second shape when it was compiled; here
        the same graphs are only made again."""
        from arachnec.tracing.blocks import capture_blocks
        from arachnec.tracing.sample import example_calls

        source = CastSamples(self.model_file, self.dtype)
        shapes = _on_meta(self.shapes)
        try:
            return capture_blocks(shapes, example_calls(shapes, source, self.clips), verify=False)
        except UserError as refusal:
            if not cannot_on_meta(refusal):
                raise
        return capture_blocks(self.model, example_calls(self.model, source, self.clips), verify=False)


def _on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def fuse_as_planned(planned: Sequence[Graph], **how: Any) -> Callable[[ShardedBlock], FusedForms]:
    """Fused forms of each block with the regions of its graph in ``planned``; ``how`` as in ``fuse_module``.

    In another precision than the one that was planned for there are other casts: then the regions are found again.
    """
    from arachnec.codegen.fused_block import fuse_block, fuse_sharded
    from arachnec.fusion.fused_graph import fuse_graph
    from arachnec.spmd.block_forward import FusedForms
    from arachnec.tracing.graph import block_graph

    def fused(block: ShardedBlock) -> FusedForms:
        graph = block_graph(block.captured)
        same = (plan for plan in planned if (plan.name, plan.inputs, plan.ops) == (graph.name, graph.inputs, graph.ops))
        graph = next(same, None) or fuse_graph(graph)
        return FusedForms(fuse_block(block.captured, graph, **how), fuse_sharded(block, graph, **how))

    return fused
