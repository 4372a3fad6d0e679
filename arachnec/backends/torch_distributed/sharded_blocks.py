"""The model's blocks, traced and replaced, once some program needs them on several ranks or computed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from arachnec.backends.torch_distributed.interpreter import SequenceParallel, needs_sequence
from arachnec.data.clip import VideoClip
from arachnec.ir.nodes import Graph, Module
from arachnec.models.file import ModelFile

if TYPE_CHECKING:
    from arachnec.spmd.block_forward import FusedForms
    from arachnec.spmd.rewrite import ShardedBlock


@dataclass
class Sequences:
    """Traces at the first program that cannot do without: a model that runs whole on each rank never is.

    With ``planned`` graphs, those of the executable after ``fuse``, always: then every block runs its fused graph.
    """

    model_file: ModelFile
    model: nn.Module
    clips: Sequence[VideoClip]
    dtype: torch.dtype | None  # what floating-point arguments are cast to
    planned: Sequence[Graph] = ()
    shapes: Callable[[], nn.Module] | None = None  # the same model without values, where its own come and go
    _installed: list[SequenceParallel] = field(default_factory=list)

    def for_program(self, module: Module) -> SequenceParallel | None:
        """The model in its sequence-parallel form if it has one by now; made if ``module`` needs it."""
        if not self._installed and (self.planned or needs_sequence(module)):
            self._installed.append(self._install())
        return self._installed[0] if self._installed else None

    def _install(self) -> SequenceParallel:
        from arachnec.spmd.sharded_model import install
        from arachnec.tracing.blocks import capture_blocks
        from arachnec.tracing.sample import example_calls

        model = self.model if self.shapes is None else _on_meta(self.shapes)
        calls = example_calls(model, _Cast(self.model_file, self.dtype), self.clips)
        # Compared with eager at a second shape when it was compiled; here the same graphs are only made again.
        captured = capture_blocks(model, calls, verify=False)
        return install(self.model, captured, fuse_as_planned(self.planned) if self.planned else None)


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


@dataclass(frozen=True)
class _Cast:
    """A model file whose samples have the precision that the run gives them."""

    model_file: ModelFile
    dtype: torch.dtype | None

    @property
    def build(self) -> Callable[[], nn.Module]:
        return self.model_file.build

    @property
    def encoders(self) -> Callable[[], dict[str, nn.Module]] | None:
        return self.model_file.encoders

    def sample(self, clip: VideoClip, generator: torch.Generator) -> tuple[dict[str, object], Tensor]:
        kwargs, target = self.model_file.sample(clip, generator)
        return {name: self._cast(value) for name, value in kwargs.items()}, target

    def _cast(self, value: object) -> object:
        """By the rule of ``make_batch``: batched arguments of two or more dimensions, not timesteps, not tables."""
        batched = isinstance(value, Tensor) and value.ndim >= 2 and value.shape[0] == 1 and value.is_floating_point()
        return value.to(self.dtype) if batched and isinstance(value, Tensor) and self.dtype is not None else value
