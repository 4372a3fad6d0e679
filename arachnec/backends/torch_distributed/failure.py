"""How a rank tells its launcher why it failed: a small JSON file, named by the environment."""

from __future__ import annotations

import os
import sys
import time
import traceback
from pathlib import Path

import msgspec

from arachnec.ir.diagnostic import UserError, refused, render

ERROR_FILE = "ARACHNEC_ERROR_FILE"


class Failure(msgspec.Struct, frozen=True):
    time: float
    user: bool  # a user's mistake: ``text`` is rendered diagnostics; otherwise ``text`` is a traceback
    text: str


def record_failure(error: BaseException) -> int:
    """Write what happened where the launcher looks, or to stderr without a launcher. Returns the exit code."""
    if isinstance(error, OSError) and (diagnostic := refused(error)) is not None:
        error = UserError(diagnostic)
    user = isinstance(error, UserError)
    text = (
        "\n".join(render(d) for d in error.diagnostics)
        if isinstance(error, UserError)
        else "".join(traceback.format_exception(error))
    )
    place = os.environ.get(ERROR_FILE)
    if place:
        draft = Path(f"{place}.draft")
        draft.write_bytes(msgspec.json.encode(Failure(time.time(), user, text)))
        draft.rename(place)
    else:
        print(text, file=sys.stderr)
    return 2 if user else 1


def read_failure(file: Path) -> Failure | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Failure)
    except (OSError, msgspec.MsgspecError):
        return None
