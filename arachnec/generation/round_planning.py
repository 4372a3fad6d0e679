"""The process that plans rounds: ``python -m arachnec.generation.round_planning PROGRAM``, a child of rank 0.

It reads a question a line, a round and the windows of switches, and answers with the proved program, which the next
question goes on from. It ends when rank 0 does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from arachnec.generation.rounds import PATIENCE, RoundPlanner, Rounds, open_windows, prefixed, round_seconds
from arachnec.ir.diagnostic import UserError, render, user_error
from arachnec.ir.nodes import Module
from arachnec.ir.parser import parse_file
from arachnec.ir.printer import print_module
from arachnec.launch.planner_process import PlannerProcess, answering
from arachnec.passes.check import checked
from arachnec.planning.sampling.replan import replanned

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
    process = PlannerProcess.of(PLANNER, str(program.absolute()))
    plan = partial(planned_by, process)
    planner = RoundPlanner(prefixed(store), plan, open_windows(module), seconds, PATIENCE * seconds)
    planner.start()
    try:
        yield rounds
    finally:
        planner.close(process.close)


def planned_by(process: PlannerProcess, round: int, windows: dict[int, tuple[int, int]]) -> tuple[str, float | None]:
    """Rank 0's side, one question at a time. Raises ``UserError`` where there is no plan, or the process has ended."""
    process.ask(Question(round, windows))
    line = next(process.answers(), b"")
    if not line:
        raise user_error("the process that plans rounds has ended")
    answer = msgspec.json.decode(line, type=Answer)
    if answer.text is None:
        raise user_error(answer.error or "no plan")
    return answer.text, answer.seconds


def main(program: str) -> None:
    reply = answering()
    module = parse_file(Path(program))
    for line in sys.stdin:
        question = msgspec.json.decode(line, type=Question)
        try:
            module = plan_again(module, question)
            reply(Answer(print_module(module), round_seconds(module, question.round)))
        except UserError as error:
            reply(Answer(error="\n".join(render(d) for d in error.diagnostics)))


if __name__ == "__main__":
    main(*sys.argv[1:])
