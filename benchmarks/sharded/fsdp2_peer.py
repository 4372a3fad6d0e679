"""Our cells against FSDP2 (`fully_shard`): one model, equal micro-batches, on gloo ranks of one thread.

    python -m benchmarks.sharded.fsdp2_peer [--ranks 2] [--micro-batches 4] [--rounds 9]

One cell of all ranks; every rank trains as many clips of one length, one after the other, in both. A step is everything
from its samples to the optimizer's update; the two take turns, its time is that of the slowest rank, a ratio that of
the two in one round. Memory is counted in processes of their own: the most bytes of tensors that are alive at once in a
step, and the peak of resident memory less what the process had before it built its model. At last one rank has a
micro-batch more than the others: what FSDP2 does then, with a time limit of a few seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path

import msgspec

from arachnec.driver import compile as compile_model
from arachnec.launch.local_ranks import RankCrashed, launch
from benchmarks.pipelines.torch_peer import LONGEST, MODEL, clips

WORKER = "benchmarks.sharded.fsdp2_rank"
UNEVEN = "uneven"
# a cascade has one clip for each rank: the tokens are those of a rank
PASSES = "shard-parameters{{cell=world}},partition{{policy=equal-token,tokens={}}},annotate,schedule-static,{}"
END = "place,bucket,lower,check"


class Memory(msgspec.Struct):
    """Of one rank, MiB."""

    tensors: float
    resident: float


def on_ranks(folder: Path, ranks: int, what: str, rounds: int = 0) -> bytes:
    """What rank 0 wrote of ``what``."""
    try:
        launch(ranks, [str(folder), what, str(rounds)], lambda _: None, worker=WORKER)
    except RankCrashed:
        if what != UNEVEN or not (folder / f"{what}.json").exists():  # ranks that gave up cannot part in good order
            raise
    return (folder / f"{what}.json").read_bytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4, help="of every rank")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        manifest = folder / "clips.jsonl"
        manifest.write_text(clips([LONGEST] * options.ranks * options.micro_batches))
        compiled = compile_model(MODEL, manifest, f"{options.ranks}:cpu", passes=PASSES.format(LONGEST, END))
        assert all(len(c.clips) == options.ranks for c in compiled.module.cascades), "micro-batches are not FSDP2's"
        compiled.write(folder / "build")
        widths = {(cascade.width, cascade.degree, cascade.side) for cascade in compiled.module.cascades}
        times = json.loads(on_ranks(folder, options.ranks, "times", options.rounds))
        memory = {
            what: msgspec.json.decode(on_ranks(folder, options.ranks, what), type=Memory) for what in ("ours", "theirs")
        }
        uneven = on_ranks(folder, options.ranks, UNEVEN).decode()
    print(
        f"{options.ranks} ranks, {options.micro_batches} micro-batches of {LONGEST} tokens on each, "
        f"{options.rounds} rounds"
    )
    print(f"  ranks, degree and clips side by side of our cascades: {sorted(widths)}")
    ratios = [ours / theirs for ours, theirs in zip(times["ours"], times["theirs"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    for what, label in (("ours", "ours"), ("theirs", "FSDP2")):
        print(
            f"  {label:6s} step {statistics.median(times[what]):8.1f} ms, "
            f"peak of tensors {memory[what].tensors:7.1f} MiB, of resident memory {memory[what].resident:7.1f} MiB"
        )
    print(
        f"  ours / FSDP2: step {middle:.3f} ({low:.3f} to {high:.3f}), tensors "
        f"{memory['ours'].tensors / memory['theirs'].tensors:.3f}, resident "
        f"{memory['ours'].resident / memory['theirs'].resident:.3f}"
    )
    print(f"  FSDP2 where rank 0 has one micro-batch more: {uneven}")


if __name__ == "__main__":
    main()
