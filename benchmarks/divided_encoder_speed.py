"""One clip's VAE on two ranks against one, in turns: seconds, and what two ranks take of one rank's time.

    python benchmarks/divided_encoder_speed.py [--rounds 3]

Ranks are processes with one thread and gloo. A round times one rank alone, while the other waits, and then both; each
is the median over the rounds. Both give the same latents: the largest difference is printed.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from diffusers import AutoencoderKLWan
from torch import Tensor

from arachnec.models.encoders import VideoEncoder
from arachnec.spmd.spatial.division import encode_divided
from arachnec.spmd.spatial.peers import Group

RANKS = (0, 1)
CLIP = (1, 3, 9, 192, 320)  # frames, height, width


def timed(run: Callable[[], Tensor]) -> tuple[float, Tensor]:
    started = time.perf_counter()
    value = run()
    return time.perf_counter() - started, value


def rank_main(rank: int, store: str, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=len(RANKS))
    torch.manual_seed(0)
    encoder = VideoEncoder(AutoencoderKLWan(base_dim=16))
    loaded = torch.randint(0, 255, CLIP, dtype=torch.uint8)
    peers = Group(RANKS, rank, dist.group.WORLD)
    alone, together, apart = [], [], 0.0
    for number in range(rounds + 1):
        dist.barrier()
        seconds, whole = timed(lambda: encoder(loaded)) if rank == 0 else (0.0, torch.zeros(0))
        dist.barrier()
        shared, divided = timed(lambda: encode_divided(encoder, loaded, peers, len(RANKS)))
        if number and rank == 0:  # the first round warms up
            alone.append(seconds)
            together.append(shared)
            apart = max(apart, float((whole - divided).abs().max() / whole.abs().max()))
    if rank == 0:
        one, two = statistics.median(alone), statistics.median(together)
        print(f"one rank {one:.3f} s, two ranks {two:.3f} s: {two / one:.3f} of it; relative difference {apart:.1e}")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, (str(Path(folder) / "store"), options.rounds), len(RANKS))


if __name__ == "__main__":
    main()
