"""Errors of a clip at run time. In: what a forward raised. Out: a message that names the clip."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import ClassVar

from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import Diagnostic, UserError
from arachnec.models.file import ran_out_of_memory


@dataclass(frozen=True)
class CannotRun(Diagnostic):
    title: ClassVar[str] = "the model cannot run on clip {clips}: {reason}"
    help: ClassVar[str] = (
        "what sample() gave for it has other shapes or types than for the clips the model was traced with: compare them"
    )
    clips: str
    reason: str


@contextmanager
def naming(clips: Sequence[VideoClip]) -> Iterator[None]:
    """What an operation of a traced graph refuses is a ``UserError`` that names the clips, and no graph's traceback."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if ran_out_of_memory(error) or not _of_a_graph(error):
            raise
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise UserError(CannotRun(None, ", ".join(clip.name for clip in clips), reason)) from error


def _of_a_graph(error: Exception) -> bool:
    """Whether an operation written in a graph raised it, and nothing that it calls: collectives have other reasons."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    while files and files[-1].endswith("/torch/_ops.py"):
        files.pop()
    return bool(files) and files[-1].startswith("<eval_with_key>")
