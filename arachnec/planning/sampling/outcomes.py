"""Planned cascades under what is known of switches: windows, forecasts, and how long each segment then takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Cascade, Clip, Module, Phase
from arachnec.ir.sampling import forecast_of, models_of, outcomes_of, segment_of, steps_taken
from arachnec.ir.values import Quantity

Windows: TypeAlias = Mapping[int, tuple[int, int]]
"""By request, the least and the most K that its switch can still come to."""


def with_windows(clips: Sequence[Clip], windows: Windows) -> tuple[Clip, ...]:
    """The requests with these windows. What has not switched by its forecast is planned for the middle of what is left:
    those that are known first are the early ones, and say nothing of the others."""

    def narrowed(clip: Clip) -> Clip:
        least, most = windows.get(clip.id, (outcomes_of(clip)[0], outcomes_of(clip)[-1]))
        forecast = forecast_of(clip) if least <= forecast_of(clip) <= most else (least + most) // 2
        attrs = clip.attrs.updated(window=(least, most), forecast=forecast if least < most else None)
        return replace(clip, attrs=attrs)

    return tuple(narrowed(clip) if "window" in clip.attrs else clip for clip in clips)


def with_forecast(cascade: Cascade, clips: Mapping[int, Clip], second: Sequence[str]) -> Cascade:
    """A cascade with the steps that the forecast of its request leaves to it; ``second`` are the models behind a
    switch."""
    if cascade.phase is not Phase.DENOISE or "switch" not in cascade.attrs:
        return cascade
    first, last = segment_of(cascade)
    taken = len(steps_taken((first, last), cascade.stage in second, forecast_of(clips[cascade.clips[0]])))
    return cascade.with_attrs(planned=taken if taken < last - first + 1 else None)


def retimed(cascade: Cascade, cost: CostModel) -> Cascade:
    """A placed cascade from its start for as long as it takes on its ranks."""
    return cascade.with_attrs(end=Quantity(cascade.start + cost.placed_time(cascade), "ms"))


def at_outcomes(module: Module, outcomes: Mapping[int, int]) -> Module:
    """A lowered module whose instructions take the time that they do at these K, the lists as they stand."""
    clips = {
        clip.id: replace(clip, attrs=clip.attrs.updated(forecast=outcomes[clip.id])) if clip.id in outcomes else clip
        for clip in module.clips
    }
    told = [with_forecast(cascade, clips, models_of(module)[1:]) for cascade in module.cascades]
    module = replace(module, clips=tuple(clips.values()), cascades=tuple(told))
    cost = CostModel(module)
    cascades = {cascade.name: retimed(cascade, cost) for cascade in told}
    ms = {cascade.name: Quantity(cascade.end - cascade.start, "ms") for cascade in cascades.values()}
    programs = tuple(
        replace(
            program,
            instructions=tuple(
                replace(step, attrs=step.attrs.updated(time=ms[step.target])) if "start" in step.attrs else step
                for step in program.instructions
            ),
        )
        for program in module.programs
    )
    return replace(module, cascades=tuple(cascades.values()), programs=programs)
