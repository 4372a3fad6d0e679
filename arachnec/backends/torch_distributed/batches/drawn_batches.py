"""The order in which a run trains an executable's clips, and the editions of its manifest that it has drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch.distributed as dist

from arachnec.checkpoint.folder import Position
from arachnec.data.batch_source import BatchSource
from arachnec.executable.batches import Batches, ManifestBatches, Mark, MixedBatches, ShuffledBatches, StratifiedBatches
from arachnec.executable.folder import Executable
from arachnec.executable.other_manifests import Edition, GrownBatches, continued, ordered
from arachnec.executable.training_options import Training, bad_value
from arachnec.ir.diagnostic import UserError, user_error, writing
from arachnec.models.caption_tokens import CaptionCounter
from arachnec.runtime.agreement import share_text
from arachnec.runtime.told_batches import ToldBatches, mark_of


def demand_no_order(training: Training) -> None:
    """Raises ``UserError`` for options that order batches, where they come from the caller."""
    for key in ("shuffle", "stratified"):
        if getattr(training, key):
            raise UserError(bad_value(key, True, "batches come from the caller", "order them there"))
    if training.mix.manifests:
        raise UserError(bad_value("mix", training.mix.paths, "batches come from the caller", "mix them there"))


def drawn_batches(
    executable: Executable, training: Training, resumed: Position | None, editions: Sequence[Edition]
) -> Batches:
    """The batches of an executable as the options order them, of all ``editions`` where it has grown. Collective where
    its manifest is long."""
    if executable.header.long is not None:
        return _from_long(executable, training, resumed)
    if training.mix.manifests:
        return MixedBatches(executable, training)
    if len(editions) > 1:
        return GrownBatches.of(editions, executable, lambda edition: _ordered(edition, training))
    return _ordered(executable, training)


def may_grow(executable: Executable, training: Training) -> bool:
    """Whether a resumed run may have more clips: a long manifest and a mix draw by numbers that would move."""
    return executable.header.long is None and not training.mix.manifests


def _ordered(executable: Executable, training: Training) -> Batches:
    if training.stratified:
        return StratifiedBatches(executable, training.seed)
    if training.shuffle:
        return ShuffledBatches(executable, training.seed)
    return ManifestBatches(executable)


def _from_long(executable: Executable, training: Training, resumed: Position | None) -> ToldBatches:
    """Rank 0 opens the manifest, at the row where a checkpoint stood, and draws; the others are told each batch."""
    if dist.get_rank() != 0:
        return ToldBatches(msgspec.json.decode(share_text(None), type=Mark))
    long = executable.header.long
    assert long is not None
    seed = training.seed if training.shuffle or training.stratified else None
    captions = CaptionCounter(executable.model_file(), training.long_captions == "refuse")
    drawing = BatchSource(
        long.drawn(seed, stratified=training.stratified), long.batch, repeat=True, captions=captions.clip
    )
    if resumed is not None:
        drawing.restore(resumed.steps * training.accumulate, resumed.clips, resumed.data, resumed.source)
    start = mark_of(drawing)
    share_text(msgspec.json.encode(start).decode())
    return ToldBatches(start, drawing, long.tokens)


FILE = "clips.json"


def run_editions(folder: Path | None, executable: Executable, done: int) -> tuple[Edition, ...]:
    """Those of a run that goes on behind ``done`` batches, on all ranks alike.

    Raises ``UserError``, on every rank, where the manifest has fewer clips than the run. Collective.
    """
    if folder is None:
        return (Edition.of(executable),)
    file = folder / FILE
    before: tuple[Edition, ...] = ()
    mine = file.read_text(errors="replace") if dist.get_rank() == 0 and file.is_file() else None
    if text := share_text(mine):
        try:
            before = ordered(msgspec.json.decode(text, type=tuple[Edition, ...]))
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise user_error(
                f"{file} cannot be read: {error}",
                help="restore that file; without it the run goes on with the clips of its first manifest alone",
            ) from None
    return continued(before, executable, done)


def note_editions(folder: Path, editions: tuple[Edition, ...]) -> None:
    """Write them beside the checkpoints; on rank 0, once the checkpoint of a resumed run has been taken."""
    file, text = folder / FILE, msgspec.json.encode(editions)
    draft = file.with_suffix(".draft")
    with writing(draft):
        folder.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(text)
    draft.rename(file)
