"""Why a rank failed, as a small record: for the launcher in a file, for the other ranks in the rendezvous store."""

from __future__ import annotations

import os
import re
import sys
import time
import traceback

import msgspec

from arachnec.ir.diagnostic import UserError, refused, render

ERROR_FD = "ARACHNEC_ERROR_FD"  # an open file of the launcher, which has no name: nothing is left of it
LARGEST_RECORD = 2**24  # bytes
LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket|gloo|nccl|timed? ?out", re.IGNORECASE
)


class Failure(msgspec.Struct, frozen=True):
    time: float
    user: bool  # a user's mistake: ``text`` is rendered diagnostics; otherwise ``text`` is a traceback
    text: str
    told_to_end: bool = False  # by a signal, and for no other reason that is known

    @property
    def exit_code(self) -> int:
        return 2 if self.user else 1


def failure_of(error: BaseException) -> Failure:
    """What there is to say of an exception."""
    if isinstance(error, OSError) and (diagnostic := refused(error)) is not None:
        error = UserError(diagnostic)
    if isinstance(error, UserError):
        return Failure(time.time(), True, "\n".join(render(d) for d in error.diagnostics))
    return Failure(time.time(), False, "".join(traceback.format_exception(error)))


def follows_from_another(error: BaseException) -> bool:
    """Whether this is what a rank sees where another has died: a broken connection, not a mistake of its own."""
    return isinstance(error, RuntimeError | ConnectionError) and LOST_PEER.search(str(error)) is not None


def record_failure(failure: Failure) -> None:
    """Write it where the launcher looks, or to stderr without a launcher."""
    descriptor = os.environ.get(ERROR_FD)
    if descriptor:
        os.pwrite(int(descriptor), msgspec.json.encode(failure), 0)
    else:
        print(failure.text, file=sys.stderr, flush=True)


def read_failure(descriptor: int) -> Failure | None:
    """What a rank recorded in the file that the launcher gave it."""
    try:
        return msgspec.json.decode(os.pread(descriptor, LARGEST_RECORD, 0), type=Failure)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
