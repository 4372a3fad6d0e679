"""The model's blocks, traced and replaced, once some program needs them on several ranks or computed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from arachnec.backends.torch_distributed.rank.rank_context import SequenceParallel
from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import UserError
from arachnec.ir.head_density import sparse_stages
from arachnec.ir.nodes import Graph, Instruction, Module, integer
from arachnec.models.file import ModelFile
from arachnec.models.precision import CastSamples
from arachnec.spmd.specialise import Graphs, Specialisation
from arachnec.tracing.errors import cannot_on_meta

if TYPE_CHECKING:
    from arachnec.spmd.sharded_model import SequenceModel
    from arachnec.tracing.captured import CapturedModel
    from arachnec.tracing.sample import ModelSource


@dataclass
class Sequences:
    """Traces at the first program that cannot do without: a model that runs whole on each rank never is.

    With ``planned`` graphs, those of the executable after ``fuse``, always: then every block runs its fused graph. A
    model that has a graph for each clip shape is traced again for every shape that a program shares.
    """

    model_file: ModelFile
    model: nn.Module
    clips: Sequence[VideoClip]
    dtype: torch.dtype | None  # what floating-point arguments are cast to
    shapes: Callable[[], nn.Module]  # the same model on the meta device
    planned: Sequence[Graph] = ()
    _installed: list[SequenceModel] = field(default_factory=list)
    _captured_shapes: set[tuple[int, ...]] = field(default_factory=set)

    def for_program(self, module: Module) -> SequenceParallel | None:
        """The model in its sequence-parallel form if it has one by now; made if ``module`` needs it."""
        if not self._installed and (self.planned or needs_sequence(module)):
            self._installed.append(self._install(_step_of(module)))
        if not self._installed:
            return None
        if _step_of(module).graphs is Graphs.SHAPES:
            self._add_shapes(self._installed[0], module)
        return self._installed[0]

    def _install(self, step: Specialisation) -> SequenceModel:
        from arachnec.codegen.fused_block import fuse_as_planned
        from arachnec.spmd.sharded_model import install
        from arachnec.spmd.specialise import captured_again

        captured = self._traced(partial(captured_again, step))
        return install(self.model, captured, fuse_as_planned(self.planned) if self.planned else None)

    def _add_shapes(self, sequence: SequenceModel, module: Module) -> None:
        """Graphs of the shapes that this program shares and none before it did."""
        from arachnec.spmd.rewrite import shard_block
        from arachnec.spmd.specialise import captured_at

        shared = {step.target for p in module.programs for step in p.instructions if is_shared(step)}
        for cascade in module.cascades:
            clip = self.clips[cascade.clips[0]]
            if cascade.name not in shared or clip.shape in self._captured_shapes:
                continue
            self._captured_shapes.add(clip.shape)
            captured = self._traced(partial(captured_at, _step_of(module), clip))
            sequence.add(captured, [shard_block(block) for block in captured.blocks])

    def _traced(self, capture: Callable[[nn.Module, ModelSource, Sequence[VideoClip]], CapturedModel]) -> CapturedModel:
        """Recorded without values, as ``trace`` does. Compared with eager at a second shape when it was compiled; here
        the same graphs are only made again."""
        source = CastSamples(self.model_file, self.dtype)
        try:
            return capture(_on_meta(self.shapes), source, self.clips)
        except UserError as refusal:
            if not cannot_on_meta(refusal):
                raise
        return capture(self.model, source, self.clips)


def needs_sequence(module: Module) -> bool:
    """Whether some cascade runs on several ranks, computes its blocks again, or can attend to chosen keys: what takes
    traced blocks."""
    if sparse_stages(module):
        return True
    steps = [step for p in module.programs for step in p.instructions]
    return any(is_shared(step) or (step.op == "forward" and step.attrs.get("recompute")) for step in steps)


def is_shared(step: Instruction) -> bool:
    """Whether a clip of this forward has several ranks."""
    return step.op == "forward" and len(step.peers) > integer(step.attrs.get("side", 1))


def _step_of(module: Module) -> Specialisation:
    return next(Specialisation.of(stage) for stage in module.stages if stage.trained)


def _on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()
