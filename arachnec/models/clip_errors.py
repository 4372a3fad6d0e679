"""Errors of a clip. In: what ``sample``, an encoder, a forward or ``loss`` raised. Out: a message that names clips."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from arachnec.data.clip import VideoClip
from arachnec.ir.diagnostic import Diagnostic, UserError, user_error
from arachnec.ir.limits import MOST_NAMES
from arachnec.ir.users_code import OURS, users_frames
from arachnec.models.file import ModelFileRaised, raised_by_user, ran_out_of_memory


@contextmanager
def naming(clips: Sequence[VideoClip], encoder: str | None = None) -> Iterator[None]:
    """What the user's code raises inside is a ``UserError`` that names the clips, at its innermost line; so is what an
    operation of a traced graph refuses. With an ``encoder``'s name it is that which runs, and its own code that
    raises."""
    try:
        yield
    except UserError as error:
        raise UserError(*(_with_clips(diagnostic, clips) for diagnostic in error.diagnostics)) from error.__cause__
    except Exception as error:
        if ran_out_of_memory(error):
            raise
        if encoder is not None and _of_the_user(error):
            where = f"the encoder `{encoder}`"
            raise UserError(_with_clips(raised_by_user(error, where), clips)) from error
        if not _of_a_graph(error):
            raise
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        raise user_error(
            f"the model cannot run on {shown_clips(clips)}: {reason}",
            help=(
                "what sample() gave for it has other shapes or types than for the clips the model was traced with: "
                "compare them"
            ),
        ) from error


def shown_clips(clips: Sequence[VideoClip]) -> str:
    """By id, with their paths, a few of many."""
    shown = [f"{clip.id}{'' if clip.path is None else f' ({clip.path})'}" for clip in clips[:MOST_NAMES]]
    more = "" if len(clips) <= MOST_NAMES else f" and {len(clips) - MOST_NAMES} more"
    return f"clip{'s' if len(clips) > 1 else ''} {', '.join(shown)}{more}"


def _with_clips(diagnostic: Diagnostic, clips: Sequence[VideoClip]) -> Diagnostic:
    if not isinstance(diagnostic, ModelFileRaised) or diagnostic.clips:
        return diagnostic
    return replace(diagnostic, clips=f", of {shown_clips(clips)}")


def _of_the_user(error: Exception) -> bool:
    """Whether the user's code raised it, and nothing of ours that it called."""
    frames = traceback.extract_tb(error.__traceback__)
    own = {frame.filename for frame in users_frames(error)}
    for frame in reversed(frames):
        if frame.filename in own:
            return True
        if frame.filename.startswith(OURS):
            return False
    return False


def _of_a_graph(error: Exception) -> bool:
    """Whether an operation written in a graph raised it, and nothing that it calls: collectives have other reasons."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    while files and files[-1].endswith("/torch/_ops.py"):
        files.pop()
    return bool(files) and files[-1].startswith("<eval_with_key>")
