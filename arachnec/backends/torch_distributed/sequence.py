"""The model's blocks, traced and replaced, once some program needs them on several ranks or computed again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from arachnec.backends.torch_distributed.interpreter import SequenceParallel, needs_sequence
from arachnec.data.clip import VideoClip
from arachnec.ir.nodes import Module
from arachnec.models.file import ModelFile


@dataclass
class Sequences:
    """Traces at the first program that cannot do without: a model that runs whole on each rank never is."""

    model_file: ModelFile
    model: nn.Module
    clips: Sequence[VideoClip]
    _installed: list[SequenceParallel] = field(default_factory=list)

    def for_program(self, module: Module) -> SequenceParallel | None:
        """The model in its sequence-parallel form if it has one by now; made if ``module`` needs it."""
        if not self._installed and needs_sequence(module):
            self._installed.append(self._install())
        return self._installed[0] if self._installed else None

    def _install(self) -> SequenceParallel:
        from arachnec.backends.sequence_blocks import install
        from arachnec.passes.trace import capture_model

        return install(self.model, capture_model(self.model_file, self.model, self.clips))
