"""Whether a plan for what a run has measured of its sparse layers is worth changing to.

In: the plan in use, a new one, and costs. Out: the one to run next. docs/sparse_planning.md, "Planned again".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from arachnec.backends.simulator import simulate
from arachnec.ir.head_density import ByLength, LayerDensity, density_rows, layer_densities, sparse_stages
from arachnec.ir.nodes import Module, Stage
from arachnec.passes.recost import Recost

GAIN = 0.02  # of the iteration's time: less is within what is known of it
MOVED = 0.02  # of a head's density: where all have moved less there is nothing to plan anew


def have_moved(before: Mapping[int, ByLength] | None, now: Mapping[int, ByLength]) -> bool:
    """Whether other layers are sparse than before, other classes of length were measured, or some head's density is
    another."""
    if before is None or before.keys() != now.keys():
        return True
    return any(_has_moved(before[layer], now[layer]) for layer in now)


def _has_moved(before: ByLength, now: ByLength) -> bool:
    (old, new) = ({None: known.heads, **dict(known.classes)} for known in (before, now))
    if old.keys() != new.keys():
        return True
    return any(abs(b - a) > MOVED * a for own in new for a, b in zip(old[own], new[own], strict=True))


def with_densities(module: Module, densities: Mapping[int, ByLength] | None) -> Module:
    """The module, its trained stages with these ``measured`` densities of the layers that are sparse by now: by their
    numbers in the model."""
    if densities is None:
        return module
    told = {stage.name: _measured(first, stage, densities) for first, stage in sparse_stages(module).items()}
    return replace(module, stages=tuple(told.get(stage.name, stage) for stage in module.stages))


def _measured(first: int, stage: Stage, densities: Mapping[int, ByLength]) -> Stage:
    table = layer_densities(stage)
    own = {layer: densities[first + layer] for layer in table if first + layer in densities}
    rows = density_rows({layer: LayerDensity.of(table[layer].share, now) for layer, now in own.items()})
    return replace(stage, attrs=stage.attrs.updated(measured=rows))


def better_plan(kept: Module, planned: Module, profile: str | None) -> Module:
    """``planned`` where it is predicted to take 2 % less than the plan in use by the same costs, else ``kept``.

    Both are lowered, of clips of equal shapes. ``profile`` is the pipeline's own.
    """
    measured = {stage.name: stage.attrs.get("measured") for stage in planned.stages}
    stages = tuple(replace(s, attrs=s.attrs.updated(measured=measured.get(s.name))) for s in kept.stages)
    in_use = replace(kept, stages=stages, cluster=planned.cluster)
    recost = Recost(profile)
    before, after = (simulate(recost.run(module)).iteration_ms for module in (in_use, planned))
    return planned if after < (1 - GAIN) * before else kept
