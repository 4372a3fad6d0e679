"""What ``run`` executes on small tensors before it starts: the executable's own program."""

from __future__ import annotations

import time

from arachnec.equivalence.compare import demand_equivalent
from arachnec.equivalence.small_program import CannotExecute
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Module
from arachnec.passes.check import checked

MOST_INSTRUCTIONS = 2000  # of a program that is worth the seconds at every start


def executed_first(program: Module) -> str:
    """What was seen, for a person.

    Raises ``UserError`` for a program that ``check`` refuses, or that does not compute what its batch asks for.
    """
    if sum(len(own.instructions) for own in program.programs) > MOST_INSTRUCTIONS:
        return "self-test left out: the program is large (arachnec check --equivalence executes it on small tensors)"
    started = time.perf_counter()
    try:
        told = demand_equivalent(checked(program)).text
    except UserError as error:
        if any(not isinstance(diagnostic, CannotExecute) for diagnostic in error.diagnostics):
            raise
        return f"self-test left out: {error}"
    return f"self-test passed: {told} ({time.perf_counter() - started:.1f} s; --no-equivalence leaves it out)"
