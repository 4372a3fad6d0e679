"""How a rank ends: with a failure, which its launcher and the other ranks read, or by a signal that asks it to.

A failure is a small record: for the launcher in a file, for the other ranks in the rendezvous store. A signal ends a
run after the step that it is in, with a checkpoint: the rank that has it says so where all ranks exchange what they
measured of a step, so that all end after the same one.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NoReturn

import click
import msgspec

from arachnec.ir.diagnostic import UserError, refused, render
from arachnec.launch.environment import ERROR_FD, local_cache

LARGEST_RECORD = 2**24  # bytes
LOST_PEER = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket|gloo|nccl|timed? ?out", re.IGNORECASE
)
MARK_S = 3600.0  # that a mark outlives its failure: all ranks of a run have ended long before
SIGNALS = (signal.SIGTERM, signal.SIGINT)
AGAIN_S = 1.0  # within which a signal is the same one: `timeout`, torchrun and a terminal tell a process and its group


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


def first_to_tell(name: str) -> bool:
    """Whether no other process of this host has told the failure of that name: it leaves a mark."""
    marks = local_cache() / "told"
    try:
        marks.mkdir(parents=True, exist_ok=True)
        for mark in marks.iterdir():  # of runs that ended long ago; which rank of a run ends last is not known
            if time.time() - mark.stat().st_mtime > MARK_S:
                mark.unlink(missing_ok=True)
        (marks / hashlib.sha256(name.encode()).hexdigest()).touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True  # better twice than not at all
    return True


def read_failure(descriptor: int) -> Failure | None:
    """What a rank recorded in the file that the launcher gave it."""
    try:
        return msgspec.json.decode(os.pread(descriptor, LARGEST_RECORD, 0), type=Failure)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


class Ended(Exception):
    """The run has failed, here or on another rank; ``tells`` says whether this rank is to tell it."""

    def __init__(self, failure: Failure, tells: bool) -> None:
        super().__init__(failure.text)
        self.failure = failure
        self.tells = tells


def exit_with(main: Callable[[], None]) -> None:
    """Run a rank's main; report what it raises to the launcher and end the process with its exit code."""
    try:
        main()
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except SystemExit:  # of a rank that has left the others in peace
        raise
    except Ended as end:
        end_process(end.failure, tells=end.tells)
    except BaseException as error:
        end_process(failure_of(error), tells=True)


def end_process(failure: Failure, *, tells: bool) -> NoReturn:
    """End this rank with the failure's exit code, without waiting for anybody."""
    if tells:
        record_failure(failure)
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: the destructors of process groups wait for ranks that will never answer.
    os._exit(failure.exit_code)


@dataclass
class StopRequest:
    """``signum`` is 0 until there was one."""

    signum: int = 0
    _since: float = 0.0

    def note(self, signum: int) -> None:
        """The first signal, where nobody asks whether it is one more."""
        if not self.signum:
            self.signum, self._since = signum, time.monotonic()

    def take(self, signals: Collection[int]) -> bool:
        """Note the first signal. False where it is one more, which asks to end at once."""
        self.note(next(number for number in SIGNALS if number in signals))
        return time.monotonic() - self._since < AGAIN_S


def exit_code(signum: int) -> int:
    """What a process returns that a signal has ended, as a shell says it."""
    return 128 + signum
