"""Steps whose gradient is not finite: no parameter changes, and a person reads why.

All ranks know the norm alike, so all of them skip the step, and count, together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from arachnec.backends.torch_distributed.reporting.report import ClipNote
from arachnec.runtime.agreement import gather_text


def notes_of_clips(own: Sequence[str | int]) -> list[ClipNote]:
    """What each rank says of some clips, put together by clip. Collective."""
    told = [msgspec.json.decode(row, type=list[str | int]) for row in gather_text(msgspec.json.encode(own).decode())]
    clips = dict.fromkeys(clip for row in told for clip in row)
    return [ClipNote(clip, [rank for rank, row in enumerate(told) if clip in row]) for clip in clips]


def cause_of_skip(notes: Sequence[ClipNote], norm: float) -> str:
    """Why a step is skipped, in words."""
    if not notes:
        kind = "not a number" if math.isnan(norm) else "infinite"
        return f"the norm of the gradient is {kind}, though the loss of every clip is finite"
    clips = ", ".join(f"{note.clip} (rank {', '.join(map(str, note.ranks))})" for note in notes)
    return f"the loss of {'clip' if len(notes) == 1 else 'clips'} {clips} is not finite"
