"""In what precision a low-precision model's gradients are kept and all-reduced: fp32 where it fits.

fp32 gradients are what the optimizer reads, so they cost no copy of their own there. Where the optimizer lies on every
rank they even save memory; dealt out, they are the larger part of it, and may take the room that a long clip needs.
"""

from __future__ import annotations

from dataclasses import replace

from arachnec.cluster.device_kinds import Devices
from arachnec.cost.memory import RESERVE, Memory
from arachnec.ir.nodes import Clip, Module, Stage
from arachnec.ir.parameter_cells import gathered_gib
from arachnec.ir.stage_sizes import element_bytes, formula_in
from arachnec.ir.state_placement import place

GIB = 2**30
FP32 = 4  # bytes
LOW = 4.0  # bytes an element, below which a precision is low


def with_gradient_precision(module: Module) -> Module:
    """Say for every trained stage of low precision in what its gradients are kept, and count its state so.

    fp32 unless a clip would then need more ranks than it does with gradients in the parameters' own precision: nothing
    that fitted is refused, or spread wider.
    """
    if module.cluster is None:
        return module
    exact = replace(module, stages=tuple(_kept(stage, "f32") for stage in module.stages))
    least = least_degrees(exact)
    if all(degree == 1 for degree in least):
        return exact
    own = replace(module, stages=tuple(_kept(stage, str(stage.attrs.get("dtype"))) for stage in module.stages))
    pairs = zip(least, least_degrees(own), strict=True)
    return exact if all(b is None or (a is not None and a <= b) for a, b in pairs) else own


def least_degrees(module: Module) -> tuple[int | None, ...]:
    """For every clip, on how many ranks it fits beside the state, with every block recomputed; None where on none."""
    assert module.cluster is not None
    gathered = max((gathered_gib(stage) for stage in module.stages if stage.trained), default=0.0)
    room = (1 - RESERVE) * module.cluster.memory - Memory(module, Devices(module.cluster)).resident - gathered
    alike = {(clip.tokens, clip.text): clip for clip in module.clips}
    least = {sizes: _least_degree(module, clip, room) for sizes, clip in alike.items()}
    return tuple(least[clip.tokens, clip.text] for clip in module.clips)


def _least_degree(module: Module, clip: Clip, room: float) -> int | None:
    assert module.cluster is not None
    needed = [_gib_needed(stage, clip) for stage in module.stages if stage.trained]
    degrees = [max(1, -int(-shared // (room - whole))) if room > whole else None for shared, whole in needed]
    least = [degree for degree in degrees if degree is not None]
    if len(least) < len(degrees) or room <= 0:
        return None
    degree = max(least, default=1)
    return degree if degree <= module.cluster.world else None


def _gib_needed(stage: Stage, clip: Clip) -> tuple[float, float]:
    """GiB of a clip's forward and backward that its ranks share, and that each of them holds."""

    def size(name: str) -> float:
        value = formula_in(stage, name)
        return value(B=1, S=clip.tokens, T=clip.text) if value else 0.0

    kept = size("saved_recompute" if "saved_recompute" in stage.attrs else "saved")
    batches = 2 * size("batch")  # in use, and the next one
    return kept + size("workspace") - size("shell"), size("shell") + batches


def _kept(stage: Stage, precision: str) -> Stage:
    """A stage with its gradients in this precision."""
    if not stage.trained or element_bytes(stage) >= LOW or "gradients" in stage.attrs or "state" not in stage.attrs:
        return stage
    return place(stage, gradients=precision)
