"""The editions of a run's manifest, beside its checkpoints in ``clips.json``."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch.distributed as dist

from arachnec.executable.folder import Executable
from arachnec.executable.other_manifests import Edition, continued, ordered
from arachnec.ir.diagnostic import user_error, writing
from arachnec.runtime.agreement import share_text

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
