"""The validation manifest of an executable: its clips with their tokens, as a file and as batches.

A batch is planned as one of training is. Noise and timestep of its clips are drawn for ``STEP``, in whatever step the
loss is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import msgspec

from arachnec.data.clip import VideoClip
from arachnec.executable.batches import Drawn, Mark
from arachnec.executable.folder import VALIDATION, ClipRow, Executable, clip_of, row_of
from arachnec.executable.part_files import not_executable_error
from arachnec.executable.training_options import Training, bad_value
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Clip
from arachnec.ir.values import Attributes

STEP = -1  # no step of training


class ValidationRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of ``validation.jsonl``: a clip, its transformer tokens, and the number of its batch."""

    clip: ClipRow
    tokens: int
    batch: int


def validation_text(iterations: Iterable[Sequence[VideoClip]], tokens: Callable[[VideoClip], int]) -> str:
    """The text of ``validation.jsonl``."""
    rows = [
        ValidationRow(row_of(clip), tokens(clip), number) for number, clips in enumerate(iterations) for clip in clips
    ]
    return "".join(msgspec.json.encode(row).decode() + "\n" for row in rows)


def demand_same_manifests(executable: Executable, training: Training) -> None:
    """Raises ``UserError`` where a run has another mix or another validation manifest than was compiled."""
    if executable.training.mix != training.mix:
        reason = "it was compiled with another"
        raise UserError(bad_value("mix", training.mix.paths, reason, "give `arachnec compile` the same option"))
    if executable.training.columns != training.columns:
        reason = "clips were read when it was compiled"
        raise UserError(bad_value("columns", training.columns, reason, "give `arachnec compile` the same option"))
    compiled, given = executable.training.validation.data, training.validation.data
    if compiled != given:
        reason = "it was compiled " + ("without one" if compiled is None else f"with {compiled!r}")
        raise UserError(bad_value("validation.data", given, reason, "give `arachnec compile` the same option"))


@dataclass(frozen=True)
class ValidationBatches:
    """The batches of the validation manifest, each in its own order."""

    executable: Executable
    told: bool = False

    def __len__(self) -> int:
        return 1 + max((row.batch for row in self._rows), default=-1)

    def draw(self, step: int) -> Drawn:
        rows = [row for row in self._rows if row.batch == step]
        clips = {number: clip_of(row.clip) for number, row in enumerate(rows)}
        planned = tuple(_planned(number, row) for number, row in enumerate(rows))
        return Drawn(step, planned, clips, self.mark(step))

    def mark(self, steps: int) -> Mark:
        return Mark(0, "")  # nothing of it is resumed

    @cached_property
    def _rows(self) -> list[ValidationRow]:
        try:
            return [msgspec.json.decode(line, type=ValidationRow) for line in self.executable.validation.splitlines()]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            reason = f"{VALIDATION}: {error}"
            raise not_executable_error(str(self.executable.folder), reason) from None


def _planned(number: int, row: ValidationRow) -> Clip:
    clip, attrs = row.clip, Attributes.of(name=clip_of(row.clip).name, iteration=row.batch)
    return Clip(number, clip.frames, clip.height, clip.width, clip.text_tokens, row.tokens, attrs)
