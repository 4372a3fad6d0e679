"""Where a job ends that its launcher starts again: at the step that its first start aimed at, not as many steps later.

That step stands in ``job.json`` beside the checkpoints, with the launcher's name of the job.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import torch.distributed as dist

from arachnec.runtime.agreement import gather_text

JOB = "job.json"
LARGEST = 4096  # bytes


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``job.json``: the launcher's name of the job, and the optimizer steps after which it ends."""

    name: str
    until: int


def end_of_job(folder: Path | None, done: int, count: int, *, restarted: bool) -> int:
    """The steps after which to end, on all ranks alike: ``count`` more than ``done``, or what the job aimed at before
    its launcher ``restarted`` it. Collective."""
    end = done + count
    if folder is None:
        return end
    if dist.get_rank() == 0:
        own = os.environ.get("TORCHELASTIC_RUN_ID", "")
        before = _read(folder / JOB) if restarted else None
        if before is not None and before.name == own:
            end = before.until
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f"{JOB}.draft"
        draft.write_bytes(msgspec.json.encode(Job(own, end)))
        draft.rename(folder / JOB)
    return int(gather_text(str(end))[0])


def _read(file: Path) -> Job | None:
    try:
        return msgspec.json.decode(file.read_bytes()[:LARGEST], type=Job)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
