"""Manifests of an executable beside the first: validation clips, and editions of a run that got more clips.

An epoch that has begun keeps the clips and the order that it began with; the clips that a manifest has more come in the
next one. A batch of validation is planned as one of training is. Noise and timestep of its clips are drawn for
``STEP``, in whatever step the loss is asked for.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec

from arachnec.data.clip import VideoClip
from arachnec.executable.batches import Batches, Drawn, Mark
from arachnec.executable.folder import VALIDATION, ClipRow, Executable, clip_of, row_of
from arachnec.executable.part_files import not_executable_error
from arachnec.executable.training_options import Training, bad_value
from arachnec.ir.diagnostic import UserError, counted, user_error
from arachnec.ir.nodes import Clip, integer
from arachnec.ir.values import Attributes

SHOWN = 5  # ids in a message


class Edition(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """From batch ``begins`` of the run on: the ids of the clips of each global batch, as the manifest has them.

    ``files`` are the names of those that are known by their row's number.
    """

    begins: int
    batches: tuple[tuple[str | int, ...], ...]
    files: dict[int, str] = {}

    def __post_init__(self) -> None:
        if not self.batches or not all(self.batches):
            raise ValueError("a batch without clips")

    @classmethod
    def of(cls, executable: Executable, begins: int = 0) -> Edition:
        """That of an executable's own manifest."""
        batches = itertools.groupby(executable.traced.clips, key=_iteration)
        rows = {clip.id: executable.clips[clip.id] for clip in executable.traced.clips}
        files = {row: file for row, clip in rows.items() if clip.id == row and (file := _file_name(clip))}
        ids = tuple(tuple(executable.clips[clip.id].id for clip in batch) for _, batch in batches)
        return cls(begins, ids, files)

    @property
    def ids(self) -> set[str | int]:
        return {id for batch in self.batches for id in batch}

    def executable(self, newest: Executable) -> Executable:
        """An executable as it was when it had this edition's clips alone. Raises ``UserError`` where one is missing."""
        known = {newest.clips[clip.id].id: clip for clip in newest.traced.clips}
        if missing := [id for batch in self.batches for id in batch if id not in known]:
            raise _missing(missing)
        clips = tuple(
            replace(known[id], attrs=known[id].attrs.updated(iteration=number))
            for number, batch in enumerate(self.batches)
            for id in batch
        )
        header = msgspec.structs.replace(newest.header, iterations=len(self.batches))
        return replace(newest, header=header, traced=replace(newest.traced, clips=clips))


@dataclass(frozen=True)
class Epochs:
    """Which epoch a batch of the run is in. ``begins`` and ``lengths``, in batches, of every edition."""

    begins: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def of(cls, editions: Sequence[Edition]) -> Epochs:
        return cls(tuple(e.begins for e in editions), tuple(len(e.batches) for e in editions))

    def epoch(self, batch: int) -> int:
        """Of a batch, counted from 0."""
        last = bisect_right(self.begins, batch) - 1
        return self._before(last) + (batch - self.begins[last]) // self.lengths[last]

    def end(self, epochs: int) -> int:
        """Batches in all at the end of so many epochs."""
        last = max(n for n in range(len(self.begins)) if n == 0 or self._before(n) < epochs)
        return self.begins[last] + (epochs - self._before(last)) * self.lengths[last]

    def _before(self, edition: int) -> int:
        """Epochs before an edition begins."""
        starts = itertools.pairwise(self.begins[: edition + 1])
        return sum((end - begin) // length for (begin, end), length in zip(starts, self.lengths, strict=False))


def ordered(editions: tuple[Edition, ...]) -> tuple[Edition, ...]:
    """The editions as they are. Raises ``ValueError`` where one begins in an epoch of the one before."""
    if editions and editions[0].begins != 0:
        raise ValueError("its first manifest does not begin with the first batch")
    for before, after in itertools.pairwise(editions):
        if after.begins <= before.begins or (after.begins - before.begins) % len(before.batches):
            raise ValueError(f"batch {after.begins} begins no epoch")
    return editions


def continued(editions: Sequence[Edition], executable: Executable, done: int) -> tuple[Edition, ...]:
    """The editions of a run that goes on with an executable's manifest behind ``done`` batches; ``editions`` are those
    of before. Where it has more clips than the latest, its own begins with the next epoch. Raises ``UserError`` where
    it has fewer, or others in their rows."""
    own = Edition.of(executable)
    kept = tuple(edition for edition in editions if edition.begins < done or edition.begins == 0)
    if not kept or done == 0:
        return (own,)
    latest = kept[-1]
    if missing := latest.ids - own.ids:
        raise _missing(sorted(missing, key=str))
    before, now = set(latest.files.values()), set(own.files.values())
    for row in sorted(latest.files.keys() & own.files.keys()):
        file, other = latest.files[row], own.files[row]
        if file != other and (file in now or other in before):  # else it has another name
            raise user_error(
                f"row {row} of the manifest was `{file}` when the run began, and is `{other}`",
                help="rows without an `id` are known by their number: append new ones at the end, or give rows ids",
            )
    if own.ids == latest.ids:
        if len(kept) > 1 and own.batches != latest.batches:  # of a single edition the checkpoint's digest says it
            raise user_error(
                "the manifest has the clips of the run to resume in other batches",
                help="compile it with the `--batch` and the order of rows that the run goes on with",
            )
        return kept
    begins = latest.begins + -(-(done - latest.begins) // len(latest.batches)) * len(latest.batches)
    return *kept, Edition.of(executable, begins)


@dataclass(frozen=True)
class GrownBatches:
    """The batches of all editions, one after the other. ``parts``: the first batch of each, and its batches."""

    parts: tuple[tuple[int, Batches], ...]
    told: bool = False

    @classmethod
    def of(
        cls, editions: Sequence[Edition], executable: Executable, ordered: Callable[[Executable], Batches]
    ) -> GrownBatches:
        return cls(tuple((edition.begins, ordered(edition.executable(executable))) for edition in editions))

    def draw(self, step: int) -> Drawn | None:
        begins, batches = next(part for part in reversed(self.parts) if part[0] <= step)
        drawn = batches.draw(step - begins)
        return None if drawn is None else replace(drawn, mark=self.mark(step + 1))

    def mark(self, steps: int) -> Mark:
        """What is remembered is that of the edition whose batch was the last."""
        clips = 0
        for (begins, batches), (end, _) in itertools.pairwise(self.parts):
            if steps <= end:
                mark = batches.mark(steps - begins)
                return replace(mark, clips=clips + mark.clips)
            clips += batches.mark(end - begins).clips
        begins, batches = self.parts[-1]
        mark = batches.mark(steps - begins)
        return replace(mark, clips=clips + mark.clips)


def _file_name(clip: VideoClip) -> str:
    """With the folder that it is in, whose own place may be another; empty for a clip that is a size alone."""
    files = [clip.path] if clip.path else [clip.cached[name] for name in sorted(clip.cached)]
    return "/".join(files[0].parts[-2:]) + (f" from frame {clip.start}" if clip.start else "") if files else ""


def _missing(ids: Sequence[str | int]) -> UserError:
    shown = ", ".join(f"`{id}`" for id in ids[:SHOWN]) + (", ..." if len(ids) > SHOWN else "")
    return user_error(
        f"the manifest lacks {counted(len(ids), 'clip')} that the run to resume trains: {shown}",
        help="a run may go on with more clips, not with fewer: put them back, or begin another run",
    )


def _iteration(clip: Clip) -> int:
    return integer(clip.attrs.get("iteration", 0))


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
