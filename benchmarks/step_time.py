"""Measured step time of the default pipeline against hand-written loops in plain PyTorch, on gloo ranks of one thread.

    python benchmarks/step_time.py [--ranks 2] [--rounds 9] [--mixes one-long,equal] [--no-profile]

Four contenders train one model on one batch: our `default` and `data-parallel`, a loop of DistributedDataParallel, and
one of FSDP2 (`fully_shard`). Both loops deal clips out longest first to the least loaded rank, by the times of this
machine, and synchronise gradients in the last backward alone. FSDP2's gathers need equal counts on all ranks, so there
ranks with fewer clips run their shortest again with weight zero; what that costs is shown. All four are ready in the
same processes and take turns in random order. A step is everything from its samples to the optimizer's update, its
time that of the slowest rank, a ratio that of two in one round; two rounds warm up. Losses must agree, or nothing is
printed.

Two mixes: one clip of 2048 tokens beside seven of 64 to 160, and eight equal clips of 512. Takes half a minute to
profile and compile, then about five seconds a round and mix.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from arachnec.launch.local_ranks import launch

DEMO = Path(__file__).parents[1] / "examples" / "demo"
MODEL = Path(__file__).parent / "models" / "pipeline_model.py"
WORKER = "benchmarks.models.step_time_rank"
PIPELINES = ("default", "data-parallel")
LOOPS = ("ddp", "fsdp2")
MIXES = {"one-long": (2048, 160, 128, 128, 96, 96, 64, 64), "equal": (512,) * 8}


def arachnec(*arguments: str | Path) -> None:
    subprocess.run([sys.executable, "-m", "arachnec", *map(str, arguments)], check=True, stdout=subprocess.DEVNULL)


def write_clips(place: Path, lengths: tuple[int, ...]) -> None:
    """A manifest of clips with so many tokens each."""
    rows = [{"id": n, "frames": f, "height": 16, "width": 16, "text_tokens": 0} for n, f in enumerate(lengths)]
    place.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def measured(mix: str, ranks: int, rounds: int, *, profiled: bool) -> dict[str, list[float]]:
    """ms of every round, by contender; and of FSDP2 the part that its clips of weight zero took."""
    cluster = f"{ranks}:cpu"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        clips, profile = folder / "clips.jsonl", folder / "profile.json"
        write_clips(clips, MIXES[mix])
        common = (MODEL, "--data", clips, "--cluster", cluster)
        if profiled:
            arachnec("profile", *common, "-o", profile)
        for pipeline in PIPELINES:
            costs = ("--profile", profile) if profiled else ()
            arachnec("compile", *common, *costs, "--passes", pipeline, "-o", folder / pipeline)
        launch(ranks, [str(folder), str(rounds)], lambda _: None, worker=WORKER)
        result: dict[str, list[float]] = json.loads((folder / "times.json").read_text())
    return result


def summary(mix: str, times: dict[str, list[float]]) -> str:
    lines = [f"{mix}: clips of {', '.join(map(str, MIXES[mix]))} tokens"]
    for name in (*PIPELINES, *LOOPS):
        own = times[name]
        lines.append(
            f"  {name:14s} median {statistics.median(own):8.1f} ms   least {min(own):8.1f}   most {max(own):8.1f}"
        )
    lines.append(f"  of fsdp2's step, clips of weight zero: {statistics.median(times['zero']):.1f} ms")
    for ours, theirs in (("default", "ddp"), ("default", "fsdp2"), ("data-parallel", "ddp")):
        ratios = [b / a for a, b in zip(times[ours], times[theirs], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        lines.append(f"  {theirs} / {ours}: {middle:.3f} (quartiles {low:.3f} and {high:.3f})")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--mixes", default=",".join(MIXES))
    parser.add_argument("--no-profile", action="store_true", help="plan by device specs")
    options = parser.parse_args()
    print(f"{options.ranks} ranks, {options.rounds} rounds in turns")
    for mix in options.mixes.split(","):
        print(summary(mix, measured(mix, options.ranks, options.rounds, profiled=not options.no_profile)), flush=True)


if __name__ == "__main__":
    main()
