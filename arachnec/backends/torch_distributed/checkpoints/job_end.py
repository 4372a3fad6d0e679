"""Where a job ends that is started again: at the step that its first start aimed at, not as many steps later.

That step stands in ``job.json`` beside the checkpoints, with the launcher's name of the job.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import torch.distributed as dist

from arachnec.runtime.agreement import gather_text

JOB = "job.json"


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``job.json``: the launcher's name of the job, and the optimizer steps after which it ends."""

    name: str
    until: int


def end_of_job(
    folder: Path | None, done: int, asked: int | None, one_pass: int | None, *, restarted: bool
) -> int | None:
    """The steps in all after which to end, on all ranks alike: as many as were ``asked`` for, else what the job aimed
    at that a checkpoint of ``done`` steps goes on with, else ``one_pass``. None: when the batches end.

    A launcher that has ``restarted`` the job asks for nothing new. Collective.
    """
    end = asked if asked is not None else one_pass
    if folder is None or end is None:
        return end
    if dist.get_rank() == 0:
        own = os.environ.get("TORCHELASTIC_RUN_ID", "")
        before = _read(folder / JOB)
        if before is not None and ((restarted and before.name == own) or (asked is None and 0 < done < before.until)):
            end = before.until
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f"{JOB}.draft"
        draft.write_bytes(msgspec.json.encode(Job(own, end)))
        draft.rename(folder / JOB)
    return int(gather_text(str(end))[0])


def _read(file: Path) -> Job | None:
    try:
        return msgspec.json.decode(file.read_bytes()[:4096], type=Job)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
