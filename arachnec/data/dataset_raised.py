"""What somebody's dataset raises, told at its own line.

In: an exception that came out of a dataset, its iterator or a worker process of its loader. Out: a diagnostic with the
exception, the last line of the user's that it came through, and what to do.
"""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from arachnec.ir.diagnostic import Diagnostic, counted
from arachnec.ir.nodes import Span

LIBRARIES = tuple(str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "purelib"))
OURS = str(Path(__file__).parents[1])
# torch's loader raises a worker's exception again, with the worker's traceback as its text
OF_A_WORKER = "Original Traceback (most recent call last):"
FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in ', re.MULTILINE)
LONGEST = 400  # letters of an exception


@dataclass(frozen=True)
class DatasetRaised(Diagnostic):
    title: ClassVar[str] = "the dataset raised {exception} after {drawn}"
    label: ClassVar[str] = "raised here"
    help: ClassVar[str] = "{remedy}"
    exception: str
    drawn: str
    remedy: str


def dataset_raised(error: BaseException, clips: int) -> DatasetRaised:
    """What to say of an ``error`` after so many clips."""
    text = str(error)
    if OF_A_WORKER in text:
        trace = text.partition(OF_A_WORKER)[2]
        named = trace.strip().splitlines()[-1]
        span = _place((match["file"], int(match["line"])) for match in FRAME.finditer(trace))
    else:
        message = " ".join(text.split())
        named = f"{type(error).__name__}{': ' if message else ''}{message}"
        span = _place_of(error)
    short = "unexpected end of data" in named or "ReadError" in named or "EOFError" in named
    remedy = (
        "the file is cut short or damaged: check it with `tar tf FILE`, and copy or write it again"
        if short
        else "correct the dataset; what was trained so far is in the checkpoint, where one is kept"
    )
    return DatasetRaised(span, named[:LONGEST], counted(clips, "clip"), remedy)


def _place_of(error: BaseException) -> Span | None:
    """The user's line that raised; of a generator that let a StopIteration out, the line that raised that."""
    while True:
        frames = traceback.extract_tb(error.__traceback__)
        place = _place((frame.filename, frame.lineno or 0) for frame in frames)
        if place is not None or error.__cause__ is None:
            return place
        error = error.__cause__


def _place(frames: Iterable[tuple[str, int]]) -> Span | None:
    own = [(file, line) for file, line in frames if line and _is_users(file)]
    if not own:
        return None
    file, line = own[-1]
    return Span(file, line, 1, line, 2)


def _is_users(filename: str) -> bool:
    path = str(Path(filename).resolve())
    return filename.endswith(".py") and not path.startswith((*LIBRARIES, OURS))
