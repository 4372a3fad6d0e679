"""What `check` costs for every way in which a back end may run handoffs, in processor seconds.

    python benchmarks/check_speed.py                          # 4096 clips, each behind its encoder, on 1024 GPUs
    python benchmarks/check_speed.py --clips 1024 --gpus 256 --repeat 5

The clips and the model are those of `scale.py`. The program is lowered once, with gradient buckets; each row is the
least of ``--repeat`` proofs, the module's caches being empty at each. All rules are gone through in every row, and what
every kind of broken one says is shown. `lower` makes programs for handoffs over the hosts, as the back end does them:
ends with 1 where these are refused. Nothing plans for the other two rows, so large programs of this mix are refused
there, rightly: from device to device a send holds a hardware queue until its receiver comes, and each partner takes a
stream, and here a rank encodes for more than seven others, and has more than 32 partners; with connections at the first
use hosts call each other in a circle.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import replace

from scale import costed

from arachnec.analysis.communicators import DEVICE_HANDOFFS, HOST_HANDOFFS, ExecutionModel
from arachnec.ir.nodes import Module
from arachnec.passes.check import find_problems
from arachnec.passes.infra.pipeline import Pipeline

MODELS = {
    "default": HOST_HANDOFFS,
    "handoffs=device,receives=after-dependencies": DEVICE_HANDOFFS,
    "connections=first-use": ExecutionModel(connections="first-use"),
}
MUST_HOLD = "default"


def seconds(work: Callable[[], object], repeat: int) -> float:
    """Processor seconds of the fastest of so many runs."""
    took = []
    for _ in range(repeat):
        gc.collect()
        started = time.process_time()
        work()
        took.append(time.process_time() - started)
    return min(took)


def lowered(clips: int, gpus: int) -> Module:
    return Pipeline.parse("schedule-z3{budget=1000ms},place,bucket,lower").run(costed(clips, gpus, encode=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clips", type=int, default=4096)
    parser.add_argument("--gpus", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    module = lowered(options.clips, options.gpus)
    count = sum(len(program.instructions) for program in module.programs)
    print(f"{options.clips} clips, {options.gpus} ranks, {count} instructions")
    refused = False
    for name, model in MODELS.items():
        problems = find_problems(module, model)
        refused |= name == MUST_HOLD and bool(problems)
        took = seconds(lambda model=model: find_problems(replace(module), model), options.repeat)  # type: ignore[misc]
        told = "; ".join(problem.title.format(**vars(problem)) for problem in problems)
        print(f"{name:45} {took:6.2f} s  {f'refused: {told}' if told else 'accepted'}")
    return int(refused)


if __name__ == "__main__":
    raise SystemExit(main())
