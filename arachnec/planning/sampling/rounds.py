"""A placed plan of requests in two rounds: what is fixed, and what may be planned again once more switches are known.

In: placed cascades and a moment. Out: the same, each with its round; a segment that runs at the moment is cut at the
next step, where its steps are certain.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Cascade, Clip, Module, Phase
from arachnec.ir.sampling import forecast_of, models_of, outcomes_of, segment_of, steps_taken
from arachnec.ir.values import Quantity
from arachnec.planning.sampling.chains import divisible_steps, placed_segments

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


TOLERANCE_MS = 1e-3


def in_rounds(module: Module, cascades: Sequence[Cascade], moment: float, round: int) -> list[Cascade]:
    """Placed cascades, some or all of ``module``: those of ``round`` start before ``moment`` ms, the others are of the
    next.

    A request whose switch comes late takes all steps of the segments that its forecast leaves empty, and what stands
    behind them starts later by so much: what would then start behind the moment is not fixed, nor is what follows in
    its chain. The encoders of a request stay together.
    """
    cut: list[Cascade] = []
    renamed: dict[str, str] = {}  # a segment that is cut, and its second part
    numbers: dict[int, int] = {}  # of each chain its next segment's, behind those of earlier rounds
    for cascade in (*module.cascades, *cascades):
        if cascade.phase is Phase.DENOISE:
            numbers[cascade.clips[0]] = max(numbers.get(cascade.clips[0], 0), number_of(cascade) + 1)
    for cascade in cascades:
        inputs = tuple(renamed.get(name, name) for name in cascade.inputs)
        parts = _cut(replace(cascade, inputs=inputs), moment, numbers)
        if len(parts) > 1:
            renamed[cascade.name] = parts[1].name
        cut += parts
    fixed = _fixed(module, cut, moment)
    return [cascade.with_attrs(round=(round if cascade.name in fixed else round + 1) or None) for cascade in cut]


def _fixed(module: Module, cascades: Sequence[Cascade], moment: float) -> set[str]:
    cost, first = CostModel(module), models_of(module)[:1]
    begun = {c.clips for c in cascades if c.phase is Phase.ENCODE and c.start < moment - TOLERANCE_MS}
    later: dict[tuple[int, ...], float] = {}  # of a chain, by how much at most; infinite behind what is not fixed
    fixed: set[str] = set()
    for cascade in cascades:
        delay = later.get(cascade.clips, 0.0)
        if cascade.phase is Phase.ENCODE:
            if cascade.clips in begun:
                fixed.add(cascade.name)
        elif cascade.start + delay < moment - TOLERANCE_MS:
            fixed.add(cascade.name)
            if "planned" in cascade.attrs and cascade.stage in first:
                whole = retimed(cascade.with_attrs(planned=None), cost)
                later[cascade.clips] = delay + whole.end - cascade.end
        else:
            later[cascade.clips] = math.inf
    return fixed


def placed_round_by_round(module: Module, before: Sequence[Cascade], cascades: Sequence[Cascade]) -> list[Cascade]:
    """Cascades on their ranks at the times that they have where every rank runs one round after another, behind
    ``before``."""
    names = {cascade.name for cascade in before}
    listed = [*before, *sorted(cascades, key=lambda cascade: (cascade.round, cascade.start))]
    placed = placed_segments(module, one_after_another(listed), CostModel(module))
    return [cascade for cascade in placed if cascade.name not in names]


def one_after_another(cascades: Sequence[Cascade]) -> list[Cascade]:
    """Cascades that are to be placed on their ranks in this order, before all that starts at 0 or later."""
    starts = range(-len(cascades), 0)
    return [
        moved(cascade.with_attrs(assigned=cascade.ranks), start - cascade.start)
        for cascade, start in zip(cascades, starts, strict=True)
    ]


def moved(cascade: Cascade, ms: float) -> Cascade:
    """Later by so much."""
    return cascade.with_attrs(start=Quantity(cascade.start + ms, "ms"), end=Quantity(cascade.end + ms, "ms"))


def with_memory(module: Module, cascades: Sequence[Cascade]) -> list[Cascade]:
    """Cascades with what they need by what they read now; ``module`` holds them and what they read."""
    cost = CostModel(module)

    def claimed(cascade: Cascade) -> Cascade:
        gib = cost.memory(cascade, cascade.even_width, 0, cascade.side)
        return cascade.with_attrs(memory=Quantity(round(gib, 6), "GiB"))

    return [claimed(cascade) for cascade in cascades]


def number_of(cascade: Cascade) -> int:
    """A segment's number in its chain."""
    return int(cascade.name.rpartition(".")[2])


def _cut(cascade: Cascade, moment: float, numbers: dict[int, int]) -> list[Cascade]:
    steps = divisible_steps(cascade)
    if steps == 1 or not cascade.start + TOLERANCE_MS < moment < cascade.end - TOLERANCE_MS:
        return [cascade]
    first, last = segment_of(cascade)
    ms = (cascade.end - cascade.start) / steps
    before = min(steps, max(1, -int(-(moment - cascade.start) // ms)))
    if before == steps:
        return [cascade]
    chain, border = cascade.clips[0], Quantity(round(cascade.start + before * ms, 6), "ms")
    name = f"r{chain}.{numbers[chain]}"
    numbers[chain] += 1
    latents = [source for source in cascade.inputs if source in _denoised(cascade)]
    inputs = (*(source for source in cascade.inputs if source not in latents), cascade.name)
    early = cascade.with_attrs(steps=(first, first + before - 1), end=border)
    late = replace(cascade.with_attrs(steps=(first + before, last), start=border), name=name, inputs=inputs)
    return [early, late]


def _denoised(cascade: Cascade) -> set[str]:
    """Of a segment's inputs the one with its latents: segments are named by numbers, encoders are not."""
    return {name for name in cascade.inputs if name.rpartition(".")[2].isdigit()}
