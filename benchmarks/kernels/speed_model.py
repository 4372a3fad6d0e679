"""An estimate, without a device, of the fraction of copy bandwidth a kernel reaches on an H200: counted, not measured.

A multiprocessor takes, for each step of its programs' loops, the longest of four times: its share of the copy bandwidth
for the bytes of a step; the issue slots of the step's instructions; the chain of one step, over the programs that run
co_resident each other; and the latency of memory over the steps read ahead (Little's law). To that come starting, the
vectors read first, the multiprocessor with the most steps, and for column sums the second kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from compile_estimate import Estimate

MULTIPROCESSORS, SCHEDULERS, CLOCK = 132, 4, 1.755e9
COPY = 4.3e12  # bytes read and written a second, as one H200 was measured
CACHE = 5e12  # bytes a second out of L2
LATENCY = 1230  # cycles to memory under load, 700 ns
CHAIN, BARRIER, DEPENDENT = (
    500,
    40,
    2.5,
)  # cycles: of reductions; of a barrier; from an instruction of a warp to its next
START, FIRST, ROUND = 2.5e-6, 1.5e-6, 0.7e-6  # seconds: a launch; the first reads; a step of the second kernel


@dataclass(frozen=True)
class Work:
    """``programs`` of at most ``run`` steps, ``steps`` in all, ``ahead`` of which a program reads beforehand; ``moved``
    bytes of rows, ``partials`` bytes of column sums, which the second kernel adds in ``rounds``."""

    programs: int
    run: int
    steps: int
    ahead: int
    moved: int
    partials: int = 0
    rounds: int = 0


def fraction_of_copy(kernel: Estimate, work: Work) -> float:
    co_resident = max(1, min(kernel.resident, math.ceil(work.programs / MULTIPROCESSORS)))
    memory = work.moved / work.steps / (COPY / MULTIPROCESSORS / CLOCK)
    issue = kernel.instructions * kernel.warps / SCHEDULERS
    alone = max(issue, kernel.instructions * DEPENDENT) + CHAIN + BARRIER * kernel.barriers
    if not work.ahead:
        alone += LATENCY
    little = LATENCY / (co_resident * max(1, work.ahead))
    step = max(memory, issue, alone / co_resident, little)
    if work.programs <= MULTIPROCESSORS * kernel.resident:
        steps = math.ceil(work.programs / MULTIPROCESSORS) * work.run
    else:
        steps = work.steps / MULTIPROCESSORS + work.run / 2
    seconds = START + FIRST + steps * step / CLOCK
    if work.partials:
        seconds += work.partials / COPY + START + work.rounds * ROUND + work.partials / CACHE
    return work.moved / COPY / seconds
