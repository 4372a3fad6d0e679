"""Another benchmark with its budgets in processor time: on a machine that others use, wall time compares nothing.

    python benchmarks/processor_time.py plan_tables.py --budget 2000 --cases 40

Every clock of the process then says how much processor time all its threads have used, and Z3's time-outs count that of
the thread that asks. The process runs on one core. So two versions of the scheduler, each run with its own PYTHONPATH,
search equally long whatever else runs, as if each had one idle core. What the benchmark prints is processor time, too.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time
from pathlib import Path
from typing import Any

import z3

# s between two looks at a question's processor time
TICK = 0.002


def limited(check: Any) -> Any:
    """``check`` of a solver whose time-out counts processor time of its thread."""

    def checked(solver: Any, *assumptions: Any) -> Any:
        ms = getattr(solver, "processor_ms", None)
        if ms is None:
            return check(solver, *assumptions)
        clock = time.pthread_getcpuclockid(threading.get_ident())
        until, over, late = time.clock_gettime(clock) + ms / 1e3, threading.Event(), threading.Event()

        def watch() -> None:
            while not over.wait(TICK):
                if time.clock_gettime(clock) > until:
                    late.set()
                    solver.ctx.interrupt()
                    return

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        try:
            answer = check(solver, *assumptions)
        finally:
            over.set()
            watching.join()
        return z3.unknown if late.is_set() else answer  # an interrupted context reads no model

    return checked


def noted(set_option: Any) -> Any:
    """``set`` of a solver that keeps the time-out to itself."""

    def noting(solver: Any, *arguments: Any, **named: Any) -> None:
        if arguments[:1] == ("timeout",):
            solver.processor_ms = arguments[1]
        else:
            set_option(solver, *arguments, **named)

    return noting


def main() -> None:
    script = Path(__file__).parent / sys.argv[1]
    sys.argv = [str(script), *sys.argv[2:]]
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    time.perf_counter = time.process_time
    z3.Solver.check = limited(z3.Solver.check)
    z3.Solver.set = noted(z3.Solver.set)
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
