"""What choosing a layout adds to planning where no other layout helps: processor time with and without the choice.

    python -m benchmarks.sharded.choice_cost [--rounds 3] [--clips 128] [--cluster 8x8:h100-80g]

Wan2.1-1.3B with its VAE, stages as traced, clips of three shapes. Tracing, which is the same with both, is left out; so
a whole compile grows by less. The two take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace

from arachnec.ir.nodes import Module
from arachnec.passes.infra.pipeline import Pipeline
from benchmarks.sharded.default_choice import LONG, MEDIUM, SHORT, module_of

PASSES = "partition,annotate,schedule-z3{steps=100},place,bucket,lower,check"


def mixed(cluster: str, count: int) -> Module:
    """Clips of three shapes in turn."""
    modules = [module_of("wan2_1_1_3b_vae", cluster, None, count, shape) for shape in (SHORT, MEDIUM, LONG)]
    return replace(modules[0], clips=tuple(modules[n % 3].clips[n] for n in range(count)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clips", type=int, default=128)
    parser.add_argument("--cluster", default="8x8:h100-80g")
    options = parser.parse_args()
    module = mixed(options.cluster, options.clips)
    pipelines = {"without": Pipeline.parse(PASSES), "with": Pipeline.parse(f"choose-layout,{PASSES}")}
    for pipeline in pipelines.values():
        pipeline.run(module)  # imports, and what is kept
    took: dict[str, list[float]] = {name: [] for name in pipelines}
    for _ in range(options.rounds):
        for name, pipeline in pipelines.items():
            started = time.process_time()
            planned = pipeline.run(module)
            took[name].append(time.process_time() - started)
    without, chosen = (statistics.median(took[name]) for name in ("without", "with"))
    layout = planned.attrs.get("layout", "replicated")
    print(
        f"{options.clips} clips on {options.cluster}, {layout}: {without:.2f} s without the choice, {chosen:.2f} s with"
    )
    print(f"  {chosen / without - 1:+.1%} of processor time, tracing apart")


if __name__ == "__main__":
    main()
