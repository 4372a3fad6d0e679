"""Our pipelines against torch.distributed.pipelining: one model, the same cuts, micro-batches and schedule, on gloo.

    python -m benchmarks.pipelines.torch_peer [--ranks 2] [--micro-batches 8] [--rounds 9] [--only 1f1b,zb-h1]

Every rank has one thread. All schedules of both are ready in the same processes and run in turns; a step is everything
from its samples to the optimizer's update, its time that of the slowest rank, a ratio that of the two in one round.
Where we have no such schedule, torch's is compared with our fastest. With mixed lengths torch pads every micro-batch to
the longest, for its stages know one shape; ours run them as they are. Losses must agree where none is padded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from arachnec.driver import compile as compile_model
from arachnec.driver import plan_iteration, plan_model
from arachnec.executable.folder import write_executable
from arachnec.launch.local_ranks import launch
from arachnec.passes.infra.pipeline import Pipeline

MODEL = Path(__file__).parents[1] / "models" / "pipeline_model.py"
WORKER = "benchmarks.pipelines.torch_peer_rank"
LONGEST = 256
MIXED = (1.0, 0.125, 0.25, 0.125, 0.5, 0.125, 0.125, 0.25)  # of the longest


@dataclass(frozen=True)
class Peer:
    """A schedule class of torch, its stages on a rank, and the same schedule of ours; none where we have none."""

    name: str
    stages: int
    ours: str | None


PEERS = (
    Peer("ScheduleGPipe", 1, "gpipe"),
    Peer("Schedule1F1B", 1, "1f1b"),
    Peer("ScheduleInterleavedZeroBubble", 1, "zb-h1"),
    Peer("ScheduleInterleaved1F1B", 2, "interleaved-1f1b"),
    Peer("ScheduleZBVZeroBubble", 2, "zb-v"),
    Peer("ScheduleLoopedBFS", 2, None),
    Peer("ScheduleDualPipeV", 2, None),
)
OURS = {"gpipe": 1, "1f1b": 1, "zb-h1": 1, "interleaved-1f1b": 2, "zb-v": 2}  # stages on a rank


def clips(lengths: Sequence[int]) -> str:
    """A manifest with one clip a micro-batch."""
    rows = [
        {"id": number, "frames": n, "height": 16, "width": 16, "text_tokens": 0} for number, n in enumerate(lengths)
    ]
    return "".join(json.dumps(row) + "\n" for row in rows)


def passes(schedule: str, stages: int) -> str:
    end = "partition{policy=single},annotate,schedule-pipeline"
    return f"stages{{p={stages}}},{end}{{schedule={schedule},degree=1,recompute=false}},lower,check"


def write_executables(folder: Path, ranks: int, lengths: Sequence[int], schedules: Sequence[str]) -> None:
    """An executable for each of our schedules, from one trace."""
    manifest = folder / "clips.jsonl"
    manifest.write_text(clips(lengths))
    first = None
    for schedule in schedules:
        pipeline = Pipeline.parse(passes(schedule, ranks * OURS.get(schedule, 1)))
        first = first or compile_model(MODEL, manifest, f"{ranks}:cpu", passes=pipeline)
        model, _ = plan_model(first.traced, pipeline)
        write_executable(
            folder / schedule,
            program=plan_iteration(model, pipeline, 0)[0],
            traced=first.traced,
            model=model,
            pipeline=str(pipeline),
            model_file=first.model_file,
            clips=[clip for clips in first.manifest.iterations for clip in clips],
        )


def measured(
    ranks: int, lengths: Sequence[int], peers: Sequence[Peer], schedules: Sequence[str], rounds: int, profile: bool
) -> dict[str, list[float]]:
    """ms of every round, by schedule."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_executables(folder, ranks, lengths, schedules)
        names = ",".join(peer.name for peer in peers)
        launch(ranks, [name, ",".join(schedules), names, str(rounds), str(int(profile))], lambda _: None, worker=WORKER)
        times: dict[str, list[float]] = json.loads((folder / "times.json").read_text())
        return times


def compared(times: dict[str, list[float]], peer: Peer) -> tuple[str, list[float]]:
    """Our schedule beside a peer's, and the ratio of every round."""
    ours = peer.ours or min((name for name in times if name in OURS), key=lambda name: statistics.median(times[name]))
    return ours, [a / b for a, b in zip(times[ours], times[peer.name], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default=",".join(OURS), help="our schedules, by name")
    parser.add_argument("--mixed", action="store_true", help="micro-batches of unequal lengths")
    parser.add_argument("--profile", action="store_true", help="rank 0 prints where its Python code spends its time")
    options = parser.parse_args()
    only = options.only.split(",")
    if options.mixed:
        lengths = [int(LONGEST * MIXED[number % len(MIXED)]) for number in range(options.micro_batches)]
        only = ["planned", *only]
    else:
        lengths = [LONGEST] * options.micro_batches
    peers = [peer for peer in PEERS if peer.ours in only or (peer.ours is None and len(only) >= len(OURS))]
    times = measured(options.ranks, lengths, peers, only, options.rounds, options.profile)
    print(f"{options.ranks} ranks, micro-batches of {', '.join(map(str, lengths))} tokens, {options.rounds} rounds")
    for name in only:
        print(f"  ours {name:18s} median {statistics.median(times[name]):8.1f} ms")
    for peer in peers:
        ours, ratios = ("planned", []) if options.mixed else compared(times, peer)
        ratios = ratios or [a / b for a, b in zip(times[ours], times[peer.name], strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        print(
            f"  {peer.name:30s} median {statistics.median(times[peer.name]):8.1f} ms   ours {ours:16s} / theirs "
            f"{statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"
        )


if __name__ == "__main__":
    main()
