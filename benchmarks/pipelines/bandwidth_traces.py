"""k of kFkB that follows a link's bandwidth, simulated: against fixed k = 1, the best fixed k, and foresight.

    python -m benchmarks.pipelines.bandwidth_traces [--seeds 5] [--steps 200] [--trace FILE] [--json FILE]

A trace says for every step how fast the links between stages are, as a part of their full speed; FILE is a JSON list of
such numbers. Without it three kinds are drawn: ``levels`` (1, 1/2, 1/5 or 1/10 for 5 to 40 steps), ``walk`` (a random
walk between 1/20 and 1) and ``spikes`` (a tenth for one to three steps, now and then). Adapting is what a run does:
``LinkWatch`` compares what a step has measured, behind every fourth step at most, and new plans begin two steps later.
A transfer takes ``--transfer`` of a forward at full speed. Times of the totals over those of each baseline; below 1 is
faster. ``foresight`` knows every step's speed before it begins.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median

from arachnec.pipelining.evaluate import StageTimes
from arachnec.pipelining.order_search import Grouping, choose_k, groupings
from arachnec.runtime.replanning import LinkWatch

AHEAD = 2  # steps: the next step's plan is ready when links are compared
SETTINGS = ((2, 8), (4, 16), (8, 32))  # stages, micro-batches
LEVELS = (1.0, 0.5, 0.2, 0.1)
SLOWEST = 0.05
Trace = list[float]


def levels(rng: random.Random, steps: int) -> Trace:
    trace: Trace = []
    while len(trace) < steps:
        trace += [rng.choice(LEVELS)] * rng.randint(5, 40)
    return trace[:steps]


def walk(rng: random.Random, steps: int) -> Trace:
    trace, speed = [], 1.0
    for _ in range(steps):
        speed = min(1.0, max(SLOWEST, speed * math.exp(rng.gauss(0.0, 0.15))))
        trace.append(speed)
    return trace


def spikes(rng: random.Random, steps: int) -> Trace:
    trace: Trace = []
    while len(trace) < steps:
        trace += [1.0] * rng.randint(5, 30) + [0.1] * rng.randint(1, 3)
    return trace[:steps]


KINDS: dict[str, Callable[[random.Random, int], Trace]] = {"levels": levels, "walk": walk, "spikes": spikes}


@dataclass(frozen=True)
class Pipeline:
    """Equal stages and micro-batches: a forward takes 1, each half of a backward 1."""

    stages: int
    count: int
    transfer: float

    def at(self, speed: float) -> Grouping:
        return _grouping(self, round(speed, 4))

    def step(self, k: int, speed: float) -> float:
        return self.at(speed).makespans[k]

    def adapting(self, trace: Trace) -> Iterator[float]:
        watch, k = LinkWatch({(0, 1): 1.0}), self.at(1.0).modest
        coming: dict[int, int] = {}
        for number, speed in enumerate(trace):
            k = coming.pop(number, k)
            yield self.step(k, speed)
            if not watch.due(number):
                continue
            after = watch.after(number, {(0, 1): speed})
            if after is not watch:
                coming[number + AHEAD] = self.at(speed).modest
            watch = after

    def totals(self, trace: Trace) -> dict[str, float]:
        fixed = {k: sum(self.step(k, speed) for speed in trace) for k in groupings(self.count)}
        return {
            "adapting": sum(self.adapting(trace)),
            "k = 1": fixed[1],
            "best fixed k": min(fixed.values()),
            "foresight": sum(min(self.at(speed).makespans.values()) for speed in trace),
        }


@cache
def _grouping(pipeline: Pipeline, speed: float) -> Grouping:
    forward = [[1.0] * pipeline.count] * pipeline.stages
    sent = [[pipeline.transfer / speed] * pipeline.count] * (pipeline.stages - 1)
    times = StageTimes(forward, forward, forward, None, sent, sent)
    room = [math.inf] * pipeline.stages
    return choose_k(times, forward, room, candidates=groupings(pipeline.count))


def report(name: str, pipeline: Pipeline, traces: Sequence[Trace]) -> dict[str, object]:
    rows = [pipeline.totals(trace) for trace in traces]
    ratios = {
        baseline: [row["adapting"] / row[baseline] for row in rows] for baseline in rows[0] if baseline != "adapting"
    }
    shown = "   ".join(f"{median(row):.3f} ({min(row):.3f} .. {max(row):.3f})" for row in ratios.values())
    print(f"{name:8s} {pipeline.stages:2d} x {pipeline.count:2d}   {shown}", flush=True)
    return {"trace": name, "stages": pipeline.stages, "micro_batches": pipeline.count, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--transfer", type=float, default=0.1)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.trace:
        traces = {options.trace.stem: [[float(speed) for speed in json.loads(options.trace.read_text())]]}
    else:
        traces = {
            kind: [draw(random.Random(seed), options.steps) for seed in range(options.seeds)]
            for kind, draw in KINDS.items()
        }
    print("trace    stages x micro-batches; adapting over: k = 1, the best fixed k, foresight; median (least .. most)")
    rows = [
        report(kind, Pipeline(stages, count, options.transfer), drawn)
        for kind, drawn in traces.items()
        for stages, count in SETTINGS
    ]
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
