"""Random programs that `check` accepts, executed: the right loss and gradients, and equal weights on all ranks.

python -m benchmarks.trust.random_runs --programs 200 -o benchmarks/results/random_runs.json
python -m benchmarks.trust.random_runs --programs 200 --layouts -o benchmarks/results/random_layouts.json
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from arachnec.equivalence.compare import demand_equivalent
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Module, Phase
from arachnec.ir.parameter_cells import cell_of
from arachnec.passes.check import checked
from benchmarks.trust.random_layouts import random_layout
from benchmarks.trust.random_programs import random_program


def kinds_of(module: Module) -> Iterator[str]:
    """What of a model's state does not lie whole on every rank, and whether clips are encoded."""
    stages = [stage for stage in module.stages if stage.trained]
    if len(stages) > 1:
        yield "stages"
    if any((cell_of(stage) or 1) > 1 for stage in stages):
        yield "cells"
    if any("sharded" in stage.attrs for stage in stages):
        yield "optimizer dealt out"
    if any("host" in stage.attrs for stage in stages):
        yield "host memory"
    if any(cascade.phase is Phase.WEIGHT for cascade in module.cascades):
        yield "backward in two halves"
    if any(cascade.degree > 1 for cascade in module.cascades):
        yield "degree above one"
    if any("recompute" in cascade.attrs for cascade in module.cascades):
        yield "recomputed"
    if any(cascade.phase is Phase.ENCODE for cascade in module.cascades):
        yield "encoders"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layouts", action="store_true", help="stages, cells and host memory instead of whole models")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {"programs": 0, "seed": options.seed, "worst": 0.0, "wrong": [], "wall_s": 0, "kinds": {}}
    if options.output and options.output.exists():  # goes on where it was stopped
        earlier = json.loads(options.output.read_text())
        result = earlier if earlier["seed"] == options.seed else result
    kinds = Counter(result["kinds"])
    worst, wrong, started = result["worst"], result["wrong"], time.time() - result["wall_s"]
    for number in range(result["programs"], options.programs):
        rng = random.Random(f"{options.seed}/{number}")
        passes, module = random_layout(rng) if options.layouts else ("", random_program(rng, ranks=4))
        kinds.update(kinds_of(checked(module)))
        try:
            worst = max(worst, demand_equivalent(module).worst)
        except UserError as error:
            wrong.append({"program": number, "passes": passes, "why": str(error)[:300]})
            print(json.dumps(wrong[-1]), flush=True)
        wall = round(time.time() - started)
        result = {"programs": number + 1, "seed": options.seed, "worst": worst, "wrong": wrong, "wall_s": wall,
                  "kinds": dict(kinds)}  # fmt: skip
        if options.output:
            options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
