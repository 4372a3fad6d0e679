"""Where an exception came through somebody's own code: neither a library's nor ours."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

from arachnec.ir.nodes import Span

LIBRARIES = tuple(str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib"))
OURS = str(Path(__file__).parents[1])


def is_users(filename: str) -> bool:
    path = str(Path(filename).resolve())
    return filename.endswith(".py") and not path.startswith((*LIBRARIES, OURS))


def users_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames of the user's own files, the innermost last."""
    return [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]


def users_line(error: BaseException) -> Span | None:
    """The user's line that raised; of a generator that let a StopIteration out, the line that raised that."""
    while True:
        frames = users_frames(error)
        if frames:
            return line_of(frames[-1].filename, frames[-1].lineno or 1)
        if error.__cause__ is None:
            return None
        error = error.__cause__


def line_of(filename: str, line: int) -> Span:
    return Span(filename, line, 1, line, 2)
