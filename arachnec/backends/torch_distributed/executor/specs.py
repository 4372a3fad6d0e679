"""Shape and precision of what an encoder will hand off, known to the receiver before anything is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from arachnec.backends.cascade_step import encode
from arachnec.data.clip import VideoClip
from arachnec.ir.nodes import Module, Phase, Program
from arachnec.models.file import ModelFile
from arachnec.runtime.handoffs import TensorSpec
from arachnec.tracing.errors import needs_values


@dataclass
class Specs:
    """Runs an encoder on the meta device, once per encoder and clip shape."""

    model_file: ModelFile
    encoders: Mapping[str, nn.Module]
    device: torch.device
    _meta: dict[str, nn.Module] = field(default_factory=dict)
    _known: dict[tuple[object, ...], TensorSpec] = field(default_factory=dict)

    def received(self, module: Module, program: Program, clips: Mapping[int, VideoClip]) -> dict[str, TensorSpec]:
        """The spec of every encoder's value this rank receives, by cascade."""
        names = {step.target for step in program.instructions if step.op == "receive"}
        return {
            cascade.name: self._of(cascade.stage, [clips[clip] for clip in cascade.clips])
            for cascade in module.cascades
            if cascade.name in names and cascade.phase is Phase.ENCODE
        }

    def _of(self, stage: str, clips: Sequence[VideoClip]) -> TensorSpec:
        rows = [self._of_clip(stage, clip) for clip in clips]
        return TensorSpec((sum(row.shape[0] for row in rows), *rows[0].shape[1:]), rows[0].dtype)

    def _of_clip(self, stage: str, clip: VideoClip) -> TensorSpec:
        # The file's own size does not matter: `load` scales to the clip's.
        key = (stage, *clip.shape)
        if key not in self._known:
            value = self._encoded(stage, clip)
            self._known[key] = TensorSpec(tuple(value.shape), value.dtype)
        return self._known[key]

    def _encoded(self, stage: str, clip: VideoClip) -> torch.Tensor:
        meta = torch.device("meta")
        try:
            if not self._meta and self.model_file.encoders is not None:
                with meta:
                    self._meta.update(self.model_file.encoders())
            with meta:
                return encode(self._meta[stage].to(meta).eval(), [clip], meta)
        except Exception as error:
            if not needs_values(error):
                raise
            # An encoder whose forward looks at values has no meta form: here its own output says its shape.
            return encode(self.encoders[stage], [clip], self.device)
