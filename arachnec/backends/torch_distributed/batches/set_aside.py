"""Clips that cannot be used in a step: set aside by name, and the others' weights corrected.

A clip whose video cannot be read keeps its place in the program: its encoder hands on a value that is not a number, so
whoever reads that value knows, with no message more. Its loss is left out, its collectives are not. Before the step the
ranks add up how many clips were left out, and N is then the number of those that took part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from arachnec.backends.torch_distributed.reporting import events
from arachnec.backends.torch_distributed.reporting.report import ClipNote, Note
from arachnec.data.clip import VideoClip
from arachnec.data.video import TooFewFrames, UnreadableVideo
from arachnec.ir.diagnostic import UserError
from arachnec.models.encoders import UnreadableClip
from arachnec.runtime.agreement import gather_values

TOLERANCE = 1e-3  # of a sum of shares
OF_A_FILE = (UnreadableVideo, TooFewFrames, UnreadableClip)
NOT_A_NUMBER = "what its encoder gave is not a number"


def is_unreadable(error: BaseException) -> bool:
    """Whether this says that one clip's file cannot be read; not a mistake in the model file or the manifest."""
    if isinstance(error, UserError):
        return all(isinstance(diagnostic, OF_A_FILE) for diagnostic in error.diagnostics)
    return isinstance(error, OSError | EOFError)


def reason_of(error: BaseException) -> str:
    if isinstance(error, UserError):
        return "; ".join(d.reason if isinstance(d, UnreadableClip) else d.message for d in error.diagnostics)
    return str(error) or type(error).__name__


def no_numbers(encoder: nn.Module, clip: VideoClip, device: torch.device) -> Tensor:
    """What ranks that share a clip's encoder put in for one that they cannot read. Of a rank that could, the result has
    no numbers then either, so its step is skipped."""
    shape = _loaded_shape(encoder, clip)
    dtype = shape.dtype if shape.dtype.is_floating_point else torch.float32
    return torch.full(shape.shape, torch.nan, dtype=dtype, device=device)


@torch.no_grad()
def stand_in(encoder: nn.Module, clip: VideoClip, device: torch.device) -> Tensor:
    """What an encoder hands on for a clip that it cannot have: of the right shape, and no number in it."""
    shape = _loaded_shape(encoder, clip)
    value: Tensor = encoder(torch.zeros(shape.shape, dtype=shape.dtype, device=device))
    return torch.full_like(value, torch.nan)


def _loaded_shape(encoder: nn.Module, clip: VideoClip) -> Tensor:
    load = encoder.load
    assert callable(load)
    shape: Tensor = load(clip, torch.device("meta"))
    return shape


def usable(encoded: Mapping[str, Tensor], clips: int) -> tuple[dict[str, Tensor], list[int]]:
    """Encoded inputs with zeros for the clips that were set aside, and the numbers of the others."""
    left_out: set[int] = set()
    for value in encoded.values():
        if value.is_floating_point() and value.shape[0] == clips:
            first = value.reshape(clips, -1)[:, 0].isnan().tolist()
            left_out |= {n for n in range(clips) if first[n] and value[n].isnan().all()}
    kept = [number for number in range(clips) if number not in left_out]
    return {name: _zeroed(value, left_out) for name, value in encoded.items()} if left_out else dict(encoded), kept


def _zeroed(value: Tensor, rows: set[int]) -> Tensor:
    changed = value.clone()
    for row in rows:
        changed[row] = 0
    return changed


@dataclass
class LeftOut:
    """How many clips of a step take no part: this rank's share of them, and the sum over all ranks."""

    share: float = 0.0
    clips: list[str | int] = field(default_factory=list)  # this rank's
    _counts: Tensor | None = None
    _told: dist.Work | None = None

    def tell(self) -> None:
        """Start to add up; once, when this rank has come to the end of its forwards. Collective."""
        if self._counts is None:
            self._counts = torch.tensor([self.share], dtype=torch.float64)
            self._told = dist.all_reduce(self._counts, async_op=True)

    def factor(self, clips: int, before: int = 0) -> float:
        """What the gradient of a step of so many clips is multiplied with, for the mean of those that took part. Not a
        number, so that the step is skipped, where ranks of one cascade differ in what they could read, or none could.
        """
        total = before + self.total()
        whole = abs(total - round(total)) < TOLERANCE and round(total) < clips
        return clips / (clips - round(total)) if whole else float("nan")

    def total(self) -> float:
        """Of all ranks, waited for."""
        self.tell()
        assert self._counts is not None
        if self._told is not None:
            self._told.wait()
            self._told = None
        return float(self._counts.numpy()[0])


def notes_of_clips(own: Sequence[str | int]) -> list[ClipNote]:
    """What each rank says of some clips, put together by clip. Collective."""
    told = gather_values(list(own), list[str | int])
    clips = dict.fromkeys(clip for row in told for clip in row)
    return [ClipNote(clip, [rank for rank, row in enumerate(told) if clip in row]) for clip in clips]


def tell_left_out(
    where: str, left_out: LeftOut, reasons: Mapping[str | int, str], clips: Iterable[VideoClip]
) -> list[ClipNote]:
    """The clips of a batch that were set aside, each with the ranks that should have trained it and the reason. Notes
    them, by name. Collective."""
    if not left_out.total():
        return []
    told = gather_values([*reasons.items()], list[tuple[str | int, str]])
    known = dict(pair for pairs in told for pair in pairs)
    names = {clip.id: clip.name for clip in clips}
    notes = []
    for note in notes_of_clips(left_out.clips):
        told_reason = known.get(note.clip, NOT_A_NUMBER)
        notes.append(msgspec.structs.replace(note, reason=told_reason))
        events.emit(Note(f"{where}: clip {names.get(note.clip, note.clip)} is set aside: {told_reason}"))
    return notes
