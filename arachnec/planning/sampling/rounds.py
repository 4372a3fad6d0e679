"""A placed plan of requests in two rounds: what is fixed, and what may be planned again once more switches are known.

In: placed cascades and a moment. Out: the same, each with its round; a segment that runs at the moment is cut at the
next step, where its steps are certain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from arachnec.cost.model import CostModel
from arachnec.ir.nodes import Cascade, Module, Phase
from arachnec.ir.sampling import segment_of
from arachnec.ir.values import Quantity
from arachnec.planning.sampling.chains import divisible_steps

TOLERANCE_MS = 1e-3


def in_rounds(cascades: Sequence[Cascade], moment: float, round: int) -> list[Cascade]:
    """Placed cascades: those that start before ``moment`` ms are of ``round``, the others of the next.

    The encoders of a request stay together.
    """
    cut: list[Cascade] = []
    renamed: dict[str, str] = {}  # a segment that is cut, and its second part
    numbers: dict[int, int] = {}  # of each chain its next segment's
    for cascade in cascades:
        if cascade.phase is Phase.DENOISE:
            numbers[cascade.clips[0]] = max(numbers.get(cascade.clips[0], 0), number_of(cascade) + 1)
    for cascade in cascades:
        inputs = tuple(renamed.get(name, name) for name in cascade.inputs)
        parts = _cut(replace(cascade, inputs=inputs), moment, numbers)
        if len(parts) > 1:
            renamed[cascade.name] = parts[1].name
        cut += parts
    begun = {c.clips for c in cut if c.phase is Phase.ENCODE and c.start < moment - TOLERANCE_MS}
    return [
        cascade.with_attrs(round=(round if _is_early(cascade, moment, begun) else round + 1) or None) for cascade in cut
    ]


def with_memory(module: Module, cascades: Sequence[Cascade]) -> list[Cascade]:
    """Cascades with what they need by what they read now; ``module`` holds them and what they read."""
    cost = CostModel(module)

    def claimed(cascade: Cascade) -> Cascade:
        gib = cost.memory(cascade, cascade.width, 0, cascade.side)
        return cascade.with_attrs(memory=Quantity(round(gib, 6), "GiB"))

    return [claimed(cascade) for cascade in cascades]


def _is_early(cascade: Cascade, moment: float, begun: set[tuple[int, ...]]) -> bool:
    return cascade.start < moment - TOLERANCE_MS or (cascade.phase is Phase.ENCODE and cascade.clips in begun)


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
