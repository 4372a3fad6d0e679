"""A process that plans for a rank, which starts it: a question a line in, an answer a line out.

It ends when the rank does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import IO

import msgspec

from arachnec.launch.environment import leave_gpus_to_ranks

NICENESS = 10
LEAVE_S = 2.0  # to end by itself, once it is told


@dataclass(frozen=True)
class PlannerProcess:
    """The rank's side."""

    process: subprocess.Popen[bytes]

    @classmethod
    def of(cls, module: str, *arguments: str) -> PlannerProcess:
        """Start ``python -m module arguments``, of a module that answers by ``answering``."""
        command = [sys.executable, "-m", module, *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        leave_gpus_to_ranks(environment)
        return cls(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment))

    def ask(self, question: msgspec.Struct) -> None:
        """Returns at once. Where the process has ended, there is no answer."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(msgspec.json.encode(question) + b"\n")
            self.process.stdin.flush()

    def answers(self) -> Iterator[bytes]:
        """Its answers, each waited for, until it ends."""
        assert self.process.stdout is not None
        return iter(self.process.stdout.readline, b"")

    def close(self) -> None:
        """End the process, whatever it does."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed, and questions that it has not read are left
            self.process.stdin.close()
        try:
            self.process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def answering() -> Callable[[msgspec.Struct], None]:
    """In the process itself, before it plans: what it answers by. What passes print goes to stderr from now on."""
    answers: IO[bytes] = sys.stdout.buffer
    sys.stdout = sys.stderr
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's; this process ends with its rank
    os.nice(NICENESS)

    def answer(reply: msgspec.Struct) -> None:
        try:
            answers.write(msgspec.json.encode(reply) + b"\n")
            answers.flush()
        except BrokenPipeError:  # the rank has ended
            os._exit(0)

    return answer
