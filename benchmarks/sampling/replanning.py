"""What planning again saves where switches come early or late, simulated.

    python -m benchmarks.sampling.replanning [FILE.json] [--seeds 2]

Requests of six sizes, 50 steps with guidance, Wan2.1's 14B then 1.3B, on 8 H100. Each request's K is drawn, evenly from
5 to 40 or early for one half and late for the other; the plan forecasts 22. ``fixed`` executes a program without rounds
at the drawn K; ``again`` takes over a new one at each border, with what segments have told by then, less a quarter of
the least round, in which it was planned; ``known`` is planned with all K from the start. All are simulated at these K.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from arachnec.backends.simulator import Simulation, simulate
from arachnec.cluster.file import parse_cluster
from arachnec.cost.model import CostModel
from arachnec.data.requests import Request
from arachnec.ir.nodes import Module, Phase
from arachnec.ir.sampling import models_of, outcomes_of, segment_of
from arachnec.ir.values import Quantity
from arachnec.passes.check import checked
from arachnec.passes.infra.pipeline import Pipeline
from arachnec.passes.rounds import PLANNING
from arachnec.planning.sampling.replan import replanned
from arachnec.planning.sampling.requests import SwitchForecast, sampling_module
from arachnec.planning.sampling.rounds import Windows, retimed, with_forecast
from benchmarks.sampling.pairs_of_models import WAN, tokens_of
from benchmarks.sampling.plans import requests_of

GPUS, COUNTS = 8, (8, 12, 16, 32, 64)
LEAST, MOST, FORECAST = 5, 40, 22
PLANNED_MS = PLANNING / 4  # each step that a switch may end takes to be planned again
DRAWN = ("even", "halves")


def at_outcomes(module: Module, outcomes: Mapping[int, int]) -> Module:
    """A lowered module whose instructions take the time that they do at these K, the lists as they stand."""
    clips = {
        clip.id: replace(clip, attrs=clip.attrs.updated(forecast=outcomes[clip.id])) if clip.id in outcomes else clip
        for clip in module.clips
    }
    told = [with_forecast(cascade, clips, models_of(module)[1:]) for cascade in module.cascades]
    module = replace(module, clips=tuple(clips.values()), cascades=tuple(told))
    cost = CostModel(module)
    cascades = {cascade.name: retimed(cascade, cost) for cascade in told}
    ms = {cascade.name: Quantity(cascade.end - cascade.start, "ms") for cascade in cascades.values()}
    programs = tuple(
        replace(
            program,
            instructions=tuple(
                replace(step, attrs=step.attrs.updated(time=ms[step.target])) if "start" in step.attrs else step
                for step in program.instructions
            ),
        )
        for program in module.programs
    )
    return replace(module, cascades=tuple(cascades.values()), programs=programs)


@dataclass(frozen=True)
class Row:
    """Seconds until the last request ends. ``planning`` is the dearest round's processor time."""

    requests: int
    drawn: str
    seed: int
    fixed: float
    again: float
    known: float
    rounds: int
    planning: float


def module_of(requests: Sequence[Request], forecasts: Sequence[SwitchForecast]) -> Module:
    stages, names = (WAN.large.stage(), WAN.small.stage()), (WAN.large.name, WAN.small.name)
    machine = parse_cluster(f"{GPUS}:h100-80g")
    return sampling_module(
        requests, tokens_of, stages, names, machine, switch="adaptive=0.1", forecasts=list(forecasts)
    )


def drawn(count: int, kind: str, seed: int) -> dict[int, int]:
    rng = random.Random(seed)
    if kind == "even":
        return {number: rng.randint(LEAST, MOST) for number in range(count)}
    return {number: rng.choice((LEAST + 2, MOST - 2)) for number in range(count)}


def told_by(module: Module, simulation: Simulation, round: int, outcomes: Mapping[int, int]) -> Windows:
    """What segments have told when the program of a round is planned: before the first rank comes to its border."""
    cascades = {cascade.name: cascade for cascade in module.cascades}
    ends: dict[str, float] = {}
    border = [0.0] * GPUS
    for interval in simulation.timeline.intervals:
        ends[interval.target] = interval.end
        if cascades[interval.target].round < round:
            border[interval.rank] = max(border[interval.rank], interval.end)
    now, first = min(border) - PLANNED_MS * (MOST - LEAST) * len(outcomes), models_of(module)[0]
    taken: dict[int, int] = {}
    for cascade in module.cascades:
        if cascade.phase is Phase.DENOISE and cascade.stage == first and ends[cascade.name] <= now:
            for number in cascade.clips:
                taken[number] = max(taken.get(number, 0), segment_of(cascade)[1] + 1)
    windows = {}
    for clip in module.clips:
        steps, k, most = taken.get(clip.id, 0), outcomes[clip.id], outcomes_of(clip)[-1]
        least = max(outcomes_of(clip)[0], min(most, steps + 1))
        windows[clip.id] = (k, k) if k <= steps else (least, most)
    return windows


def row_of(count: int, kind: str, seed: int) -> Row:
    requests, outcomes = requests_of(count, seed), drawn(count, kind, seed)
    open_switch = SwitchForecast(LEAST, MOST, FORECAST)
    placed = Pipeline.parse("segment,annotate,schedule-sampling,place").run(module_of(requests, [open_switch] * count))
    fixed = simulate(at_outcomes(Pipeline.parse("lower,check").run(placed), outcomes)).makespan_ms
    first = Pipeline.parse("rounds,lower,check").run(placed)
    program, round, dearest = first, 1, 0.0
    simulation = simulate(at_outcomes(program, outcomes))
    while max(cascade.round for cascade in program.cascades) >= round:
        started = time.process_time()
        program = checked(replanned(program, round, told_by(program, simulation, round, outcomes)))
        dearest = max(dearest, time.process_time() - started)
        simulation = simulate(at_outcomes(program, outcomes))
        round += 1
    certain = module_of(requests, [SwitchForecast.fixed(outcomes[number]) for number in range(count)])
    known = simulate(Pipeline.parse("generate").run(certain)).makespan_ms
    seconds = (ms / 1e3 for ms in (fixed, simulation.makespan_ms, known))
    return Row(count, kind, seed, *seconds, round - 1, dearest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path, nargs="?", help="write the rows there")
    parser.add_argument("--seeds", type=int, default=2)
    arguments = parser.parse_args()
    rows: list[Row] = []
    print("requests  drawn seed   fixed s   again s   known s   saved  of what is possible  rounds  planning s")
    for count in COUNTS:
        for kind in DRAWN:
            for seed in range(arguments.seeds):
                rows.append(row := row_of(count, kind, seed))
                part = (row.fixed - row.again) / (row.fixed - row.known) if row.fixed > row.known else 1.0
                print(
                    f"{count:>8} {kind:>6} {seed:>4} {row.fixed:>9.1f} {row.again:>9.1f} {row.known:>9.1f}"
                    f" {1 - row.again / row.fixed:>7.1%} {part:>20.0%} {row.rounds:>7} {row.planning:>11.2f}",
                    flush=True,
                )
                if arguments.file:
                    arguments.file.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    saved = [1 - row.again / row.fixed for row in rows]
    print(f"saved: median {statistics.median(saved):.1%}, {min(saved):.1%} to {max(saved):.1%}")


if __name__ == "__main__":
    main()
