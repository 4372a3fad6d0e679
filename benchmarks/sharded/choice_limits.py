"""How far the default is behind plans that have no limit, and behind the layouts that others train in.

Mixed clips of the traced models of ``benchmarks/data``: ms of an iteration, simulated, of the default; of the default
with as many steps as it takes, no candidate left out for what it promises; of `fsdp`, `fsdp-hybrid` and `ulysses`; the
processor time of the default in s. Fails where a limit costs more than 0.5 %, or another one is 0.1 % shorter::

    python -m benchmarks.sharded.choice_limits
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from unittest import mock

from arachnec.backends.simulator import simulate
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Module
from arachnec.passes.infra.named_pipelines import PIPELINES
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.planning import layouts
from benchmarks.traced_stages import module_of, video_mix

ROWS = (
    ("cogvideox_5b", "2x8:h100-80g", 36),
    ("cogvideox_5b", "8x8:h100-80g", 20),
    ("hunyuanvideo", "2x8:h100-80g", 24),
    ("wan2_1_14b", "2x8:h100-80g", 24),
    ("wan2_1_1_3b_vae", "8x8:h100-80g", 36),
)
DEFAULT = "choose-layout,offload,partition{policy=dual},annotate,schedule-z3{steps=500},place,bucket,lower,check"
UNLIMITED = DEFAULT.replace("choose-layout", f"choose-layout{{steps={10**9}}}")
OTHERS = ("fsdp", "fsdp-hybrid", "ulysses")


def ms(pipeline: str, module: Module) -> float:
    """Of an iteration, simulated; infinite where a clip does not fit."""
    try:
        return simulate(Pipeline.parse(pipeline).run(module)).iteration_ms
    except UserError:
        return math.inf


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(f"| model, cluster, clips | default, ms | without limits | {' | '.join(OTHERS)} | planning, s |")
    print("|---|---|---|---|---|---|---|")
    behind = []
    for model, cluster, count in ROWS:
        module = module_of(model, video_mix(count, seed=count), cluster)
        started = time.process_time()
        default = ms(DEFAULT, module)
        taken = time.process_time() - started
        with mock.patch.object(layouts, "FAR", math.inf):
            unlimited = ms(UNLIMITED, module)
        others = [ms(PIPELINES[name], module) for name in OTHERS]
        figures = " | ".join("-" if math.isinf(time) else f"{time:.1f}" for time in (default, unlimited, *others))
        print(f"| {model}, {cluster}, {count} | {figures} | {taken:.1f} |", flush=True)
        if math.isfinite(default) and (default > 1.005 * unlimited or default > 1.001 * min(others)):
            behind.append(f"{model}, {cluster}, {count}")
    if behind:
        sys.exit(f"too far behind: {'; '.join(behind)}")


if __name__ == "__main__":
    main()
