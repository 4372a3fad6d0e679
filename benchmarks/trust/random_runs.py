"""Random programs that `check` accepts, executed: the right loss and gradients, and equal weights on all ranks.

python benchmarks/trust/random_runs.py --programs 200 -o benchmarks/results/random_runs.json
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

from arachnec.equivalence.compare import demand_equivalent
from arachnec.ir.diagnostic import UserError
from arachnec.passes.check import checked
from benchmarks.trust.random_programs import random_program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    result: dict[str, Any] = {"programs": 0, "seed": options.seed, "worst": 0.0, "wrong": [], "wall_s": 0}
    if options.output and options.output.exists():  # goes on where it was stopped
        earlier = json.loads(options.output.read_text())
        result = earlier if earlier["seed"] == options.seed else result
    worst, wrong, started = result["worst"], result["wrong"], time.time() - result["wall_s"]
    for number in range(result["programs"], options.programs):
        module = checked(random_program(random.Random(f"{options.seed}/{number}"), ranks=4))
        try:
            worst = max(worst, demand_equivalent(module).worst)
        except UserError as error:
            wrong.append({"program": number, "why": str(error)[:300]})
            print(json.dumps(wrong[-1]), flush=True)
        wall = round(time.time() - started)
        result = {"programs": number + 1, "seed": options.seed, "worst": worst, "wrong": wrong, "wall_s": wall}
        if options.output:
            options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
