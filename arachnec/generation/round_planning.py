"""The process that plans rounds: ``python -m arachnec.generation.round_planning PROGRAM``, a child of rank 0.

It reads a question a line, a round and the windows of switches, and answers with the proved program, which the next
question goes on from. It ends when rank 0 does.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from arachnec.generation.rounds import RoundPlanner, Rounds, open_windows, prefixed, round_seconds
from arachnec.ir.diagnostic import UserError, render
from arachnec.ir.nodes import Module
from arachnec.ir.parser import parse_file
from arachnec.ir.printer import print_module
from arachnec.launch.local_ranks import RankTold
from arachnec.passes.check import checked
from arachnec.planning.sampling.replan import replanned

NICENESS = 10
PLANNER = "arachnec.generation.round_planning"


class Question(msgspec.Struct, frozen=True):
    round: int
    windows: dict[int, tuple[int, int]]


class Answer(msgspec.Struct, frozen=True):
    text: str | None = None
    seconds: float | None = None  # of the round; None where nothing is planned again behind it
    error: str | None = None


def plan_again(module: Module, question: Question) -> Module:
    """The proved program behind a round. Raises ``UserError`` where there is none."""
    return checked(replanned(module, question.round, question.windows))


@contextmanager
def planned_in_rounds(store: Any, rank: int, program: Path, module: Module) -> Iterator[Rounds | None]:
    """The rounds of a run, on every rank, while rank 0 has them planned; None where nothing is planned again."""
    seconds = round_seconds(module, 0)
    if seconds is None:
        yield None
        return
    rounds = Rounds(rank, prefixed(store))
    if rank:
        yield rounds
        return
    process = PlanningProcess.of(program)
    planner = RoundPlanner(prefixed(store), process.plan, open_windows(module), seconds)
    planner.start()
    try:
        yield rounds
    finally:
        planner.close(process.close)


@dataclass
class PlanningProcess:
    """Rank 0's side: one question at a time."""

    process: subprocess.Popen[bytes]

    @classmethod
    def of(cls, program: Path) -> PlanningProcess:
        command = [sys.executable, "-m", PLANNER, str(program.absolute())]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return cls(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment))

    def plan(self, round: int, windows: dict[int, tuple[int, int]]) -> tuple[str, float | None]:
        """Raises ``UserError`` where there is no plan, or the process has ended."""
        questions, answers = self._pipes()
        try:
            questions.write(msgspec.json.encode(Question(round, windows)) + b"\n")
            questions.flush()
            line = answers.readline()
        except BrokenPipeError:
            line = b""
        if not line:
            raise UserError(RankTold(None, "the process that plans rounds has ended"))
        answer = msgspec.json.decode(line, type=Answer)
        if answer.text is None:
            raise UserError(RankTold(None, answer.error or "no plan"))
        return answer.text, answer.seconds

    def close(self) -> None:
        """End the process, whatever it does."""
        self._pipes()[0].close()
        try:
            self.process.wait(2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _pipes(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self.process.stdin is not None and self.process.stdout is not None
        return self.process.stdin, self.process.stdout


def main(program: str) -> None:
    # What passes print must not get between the answers.
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's; this process ends with its rank
    os.nice(NICENESS)
    module = parse_file(Path(program))
    for line in sys.stdin:
        question = msgspec.json.decode(line, type=Question)
        try:
            module = plan_again(module, question)
            answer = Answer(print_module(module), round_seconds(module, question.round))
        except UserError as error:
            answer = Answer(error="\n".join(render(d) for d in error.diagnostics))
        try:
            answers.write(msgspec.json.encode(answer) + b"\n")
            answers.flush()
        except BrokenPipeError:  # the rank has ended
            os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
