"""What is left of the speed-up that FLOPs allow a pair of models, after hand-over, uneven groups and residency.

    python benchmarks/sampling/pairs.py [--json results.json]

Equal requests of 50 steps on 1, 8 and 16 H100, K of them the large model's, simulated against the large model alone,
planned by the same search. `allowed` is by FLOPs: 50 / (K + (50 - K) / ratio). Wan2.1 14B and 1.3B at 81 x 480 x 832,
CogVideoX 5B and 2B at 17,776 tokens, K of SRDiffusion's speed-ups (arXiv 2505.19151) rounded to whole steps. `one` is
a single request, `many` two for every GPU. Without guidance.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from arachnec.backends.simulator import simulate
from arachnec.data.requests import Request
from arachnec.passes.infra.pipeline import Pipeline
from benchmarks.sampling.pairs_of_models import PAIRS, Pair, module_of

STEPS = 50
LARGE_STEPS = {"wan2_1": (20, 14, 10, 7, 4), "cogvideox": (24, 11, 3)}
CLUSTERS = {1: "1:h100-80g", 8: "8:h100-80g", 16: "2x8:h100-80g"}
BUDGET = "500ms"


@dataclass(frozen=True)
class Row:
    """Seconds until the last request ends, of the pair and of the large model alone."""

    pair: str
    gpus: int
    requests: int
    large_steps: int
    alone: float
    together: float
    allowed: float

    @property
    def speed_up(self) -> float:
        return self.alone / self.together


def seconds(pair: Pair, count: int, gpus: int, large: int) -> float:
    """Simulated; with ``large`` of all steps the large model alone."""
    requests = [Request(str(n), "a", 81, 480, 832, steps=STEPS, text_tokens=226) for n in range(count)]
    module = module_of(pair, requests, CLUSTERS[gpus], large, pair.tokens)
    passes = f"segment,annotate,schedule-sampling{{budget={BUDGET}}},place,lower,check"
    return simulate(Pipeline.parse(passes).run(module)).makespan_ms / 1e3


def rows() -> Iterator[Row]:
    for name, pair in PAIRS.items():
        for gpus in CLUSTERS:
            for count in (1, 2 * gpus):
                alone = seconds(pair, count, gpus, STEPS)
                for large in LARGE_STEPS[name]:
                    together = seconds(pair, count, gpus, large)
                    yield Row(name, gpus, count, large, alone, together, pair.allowed(STEPS, large))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows there")
    arguments = parser.parse_args()
    for name, pair in PAIRS.items():
        large, small = pair.large.tflop(pair.tokens), pair.small.tflop(pair.tokens)
        print(f"{name}: {large:.1f} and {small:.1f} TFLOP a step, at most {pair.ratio:.2f}x")
    print("     pair  GPUs requests   K   alone s  pair s  speed-up  allowed   left")
    listed = []
    for row in rows():
        listed.append(asdict(row) | {"speed_up": row.speed_up})
        print(
            f"{row.pair:>9} {row.gpus:>5} {row.requests:>8} {row.large_steps:>3} {row.alone:>9.1f} {row.together:>7.1f}"
            f" {row.speed_up:>8.2f}x {row.allowed:>7.2f}x {row.speed_up / row.allowed:>6.1%}",
            flush=True,
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
