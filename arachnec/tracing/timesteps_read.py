"""Whether a model file's ``sample`` draws its noise level as the options say: seen by what it reads of a clip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from arachnec.data.clip import UNIFORM, Timesteps, VideoClip
from arachnec.ir.diagnostic import Span, user_error
from arachnec.tracing.sample import ModelSource, arguments_of


def demand_timesteps_read(
    source: ModelSource, timesteps: Timesteps, clip: VideoClip, encoders: Mapping[str, nn.Module], span: Span | None
) -> None:
    """Raises ``UserError`` where ``sample``, defined at ``span``, would ignore these timesteps.

    ``encoders`` are on the meta device, as tracing has them.
    """
    if timesteps == UNIFORM:
        return
    noted = _Noted(timesteps)
    arguments_of(source, replace(clip, timesteps=noted), encoders, device="meta")  # type: ignore[arg-type]
    if not noted.reads:
        raise user_error(
            "the training options have `timesteps`, and `sample` does not read them",
            help=(
                "draw the noise level by `clip.timesteps`, as arachnec.models.diffusers.common.draw_time does, or "
                "leave [timesteps] out"
            ),
            span=span,
        )


class _Noted:
    """Timesteps that know what was asked of them."""

    def __init__(self, timesteps: Timesteps) -> None:
        self.reads: list[str] = []
        self._timesteps = timesteps

    def __getattr__(self, name: str) -> Any:
        self.reads.append(name)
        return getattr(self._timesteps, name)
