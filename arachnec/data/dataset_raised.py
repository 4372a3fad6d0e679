"""What somebody's dataset raises, told at its own line.

In: an exception that came out of a dataset, its iterator or a worker process of its loader. Out: a diagnostic with the
exception, the last line of the user's that it came through, and what to do.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from arachnec.ir.diagnostic import Diagnostic, counted
from arachnec.ir.limits import LONGEST_EXCEPTION
from arachnec.ir.nodes import Span
from arachnec.ir.users_code import is_users, line_of, users_line

# torch's loader raises a worker's exception again, with the worker's traceback as its text
OF_A_WORKER = "Original Traceback (most recent call last):"
FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+), in ', re.MULTILINE)


@dataclass(frozen=True)
class DatasetRaised(Diagnostic):
    title = "the dataset raised {exception} after {drawn}"
    label = "raised here"
    help = "{remedy}"
    exception: str
    drawn: str
    remedy: str


def dataset_raised(error: BaseException, clips: int) -> DatasetRaised:
    """What to say of an ``error`` after so many clips."""
    text = str(error)
    if OF_A_WORKER in text:
        trace = text.partition(OF_A_WORKER)[2]
        named = trace.strip().splitlines()[-1]
        frames = [(match["file"], int(match["line"])) for match in FRAME.finditer(trace)]
        span = _last_of_the_users(frames)
    else:
        message = " ".join(text.split())
        named = f"{type(error).__name__}{': ' if message else ''}{message}"
        frames = [(frame.filename, frame.lineno or 1) for frame in traceback.extract_tb(error.__traceback__)]
        span = users_line(error)
    from_shards = any("webdataset" in Path(file).parts for file, _ in frames)
    return DatasetRaised(span, named[:LONGEST_EXCEPTION], counted(clips, "clip"), _remedy(named, from_shards))


def _remedy(named: str, from_shards: bool) -> str:
    if "nodesplitter" in named:  # of WebDataset, where torchrun has set a number of ranks
        return "only rank 0 draws, for all ranks: give WebDataset nodesplitter=None"
    short = "unexpected end of data" in named or "ReadError" in named or "EOFError" in named
    if from_shards and named.startswith("KeyError"):
        return "no file of the item has this name, or its shard is cut short: look with `tar tf FILE`"
    return (
        "the file is cut short or damaged: check it with `tar tf FILE`, and copy or write it again"
        if short
        else "correct the dataset; what was trained so far is in the checkpoint, where one is kept"
    )


def _last_of_the_users(frames: Iterable[tuple[str, int]]) -> Span | None:
    own = [frame for frame in frames if is_users(frame[0])]
    return line_of(*own[-1]) if own else None
