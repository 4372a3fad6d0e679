"""One rank of `step_time.py`: our two programs and two loops in plain PyTorch, step by step in turns."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from arachnec.data.clip import VideoClip
from arachnec.executable.folder import Executable, read_executable
from arachnec.launch.ending import exit_with
from arachnec.launch.ranks import as_rank
from arachnec.models.batch import clip_generator
from benchmarks.sharded.fsdp2_rank import Step, our_step, timed
from benchmarks.step_time import PIPELINES

TRIED = 3  # forward and backward of each length, to know its time


def clip_ms(executable: Executable) -> dict[tuple[int, ...], float]:
    """What a clip of each shape takes on one rank, alike on all ranks: the mean of theirs."""
    model_file = executable.model_file()
    model = model_file.build()
    shapes = {clip.shape: clip for clip in executable.clips}
    least = []
    for shape in sorted(shapes):
        times = []
        for _ in range(TRIED):
            started = time.perf_counter()
            arguments, target = model_file.sample(shapes[shape], torch.Generator().manual_seed(0))
            model_file.loss(model(**arguments), target).backward()
            times.append((time.perf_counter() - started) * 1e3)
        least.append(min(times))
    mean = torch.tensor(least)
    dist.all_reduce(mean)
    return dict(zip(sorted(shapes), (mean / dist.get_world_size()).tolist(), strict=True))


def dealt_out(clips: Sequence[VideoClip], ms: Mapping[tuple[int, ...], float], ranks: int) -> list[list[VideoClip]]:
    """Longest first to the least loaded rank."""
    loads, own = [0.0] * ranks, [list[VideoClip]() for _ in range(ranks)]
    for clip in sorted(clips, key=lambda clip: -ms[clip.shape]):
        rank = loads.index(min(loads))
        own[rank].append(clip)
        loads[rank] += ms[clip.shape]
    return own


def loop_step(
    executable: Executable,
    model: nn.Module,
    micro_batches: Sequence[tuple[VideoClip, float]],
    synchronise: Callable[[bool], Any],
) -> Step:
    """A training step over this rank's clips, each with its weight; gradients are averaged over the ranks."""
    model_file, training = executable.model_file(), executable.training
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    world = dist.get_world_size()

    def step(number: int) -> float:
        total = torch.zeros(())
        for place, (clip, weight) in enumerate(micro_batches):
            arguments, target = model_file.sample(clip, clip_generator(training.seed, number, clip.id))
            with synchronise(place == len(micro_batches) - 1):
                loss = model_file.loss(model(**arguments), target) * weight
                (loss * world).backward()  # the mean over the ranks is taken of it
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        return float(total)

    return step


def built(executable: Executable) -> nn.Module:
    torch.manual_seed(executable.training.seed)
    return executable.model_file().build()


class Always:
    """A context that does nothing; what is to be done was done before."""

    def __enter__(self) -> None: ...
    def __exit__(self, *told: object) -> None: ...


def ddp_step(executable: Executable, own: Sequence[VideoClip]) -> Step:
    model = DistributedDataParallel(built(executable), gradient_as_bucket_view=True)
    count = len(executable.clips)
    return loop_step(
        executable, model, [(clip, 1 / count) for clip in own], lambda last: Always() if last else model.no_sync()
    )


def fsdp2_step(executable: Executable, own: Sequence[VideoClip], most: int) -> Step:
    """As many micro-batches as the rank with most: the shortest clip again, with weight zero."""
    model: Any = built(executable)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def synchronise(last: bool) -> Always:
        model.set_requires_gradient_sync(last)
        return Always()

    count = len(executable.clips)
    shortest = min(executable.clips, key=lambda clip: clip.frames)
    fill = [(shortest, 0.0)] * (most - len(own))  # first, so that the last backward is of a clip that counts
    return loop_step(executable, model, [*fill, *((clip, 1 / count) for clip in own)], synchronise)


def main(folder: str, rounds: str) -> None:
    place = Path(folder)

    def work(device: torch.device) -> None:
        torch.set_num_threads(1)
        default, data_parallel = (read_executable(place / name) for name in PIPELINES)
        ms = clip_ms(default)
        shares = dealt_out(default.clips, ms, dist.get_world_size())
        own, most = shares[dist.get_rank()], max(map(len, shares))
        contenders: dict[str, Callable[[], Step]] = {
            "default": partial(our_step, default),
            "data-parallel": partial(our_step, data_parallel),
            "ddp": partial(ddp_step, default, own),
            "fsdp2": partial(fsdp2_step, default, own, most),
        }
        times = timed({name: make() for name, make in contenders.items()}, int(rounds), device)
        shortest = min(ms.values())
        zero = max(most - len(share) for share in shares) * shortest
        if dist.get_rank() == 0:
            (place / "times.json").write_text(json.dumps({**times, "zero": [zero]}))

    as_rank(work, cpu=True)


if __name__ == "__main__":
    exit_with(lambda: main(*sys.argv[1:]))
