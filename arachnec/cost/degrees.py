"""Which degrees are legal for a cascade, and which of them the planner tries.

Everything that accepts, bounds or refuses a schedule asks for the legal ones: ``planning.validate``, ``with_times``,
the lower bounds. Schedulers may try fewer.
"""

from __future__ import annotations

from arachnec.ir.nodes import Cascade, Phase, Stage, integers
from arachnec.ir.stage_sizes import times_of

EVERY, STEP, WIDE, WIDE_STEP = 64, 8, 256, 32  # 110 of 1024 degrees, no two neighbours more than an eighth apart


def legal_degrees(cascade: Cascade, stage: Stage, world: int) -> tuple[int, ...]:
    """Degrees at which a cascade can run on ``world`` ranks, ascending; memory is not asked.

    Those that were measured, else those that the stage lists, else any that leaves no rank without a token or, of an
    encoder, without a clip.
    """
    times = times_of(cascade)
    if times:
        return tuple(sorted(degree for degree in times if degree <= world))
    listed = stage.attrs.get("degrees")
    if listed is not None:
        return tuple(sorted(degree for degree in integers(listed) if degree <= world))
    most = cascade.batch if cascade.phase is Phase.ENCODE else max(1, cascade.tokens)
    return tuple(range(1, min(world, most) + 1))


def tried_degrees(cascade: Cascade, legal: tuple[int, ...]) -> tuple[int, ...]:
    """Of ``legal`` those that schedulers try: all measured ones, else all up to 64, then coarser steps, the last."""
    if times_of(cascade):
        return legal
    return tuple(
        degree
        for degree in legal
        if degree <= EVERY or degree == legal[-1] or degree % (STEP if degree <= WIDE else WIDE_STEP) == 0
    )
