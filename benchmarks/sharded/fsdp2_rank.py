"""One rank of `fsdp2_peer.py`: steps of both in turns, the memory of one, or FSDP2 with uneven counts."""

from __future__ import annotations

import gc
import json
import random
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.backends.torch_distributed.run.training_run import Trainer
from arachnec.executable.folder import Executable, read_executable
from arachnec.launch.ending import exit_with
from arachnec.launch.ranks import as_rank
from arachnec.models.batch import clip_generator
from arachnec.runtime.agreement import gather
from benchmarks.sharded.fsdp2_peer import Memory

Step = Callable[[int], float]
MIB = 2**20
LIMIT_S = 8  # for ranks with uneven counts


def our_step(executable: Executable) -> Step:
    trainer = Trainer(executable, RunOptions(), torch.device("cpu"))
    return lambda number: trainer.step(number).loss


def fsdp_step(executable: Executable, own: int | None = None) -> Step:
    """A training step of FSDP2 over every ``world``-th clip, or over this rank's first ``own``."""
    model_file, training = executable.model_file(), executable.training
    rank, world = dist.get_rank(), dist.get_world_size()
    clips = executable.clips[rank::world] if own is None else executable.clips[:own]
    torch.manual_seed(training.seed)
    model: Any = model_file.build()
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=training.lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)

    def step(number: int) -> float:
        total = torch.zeros(())
        for clip in clips:
            arguments, target = model_file.sample(clip, clip_generator(training.seed, number, clip.id))
            loss = model_file.loss(model(**arguments), target) / len(clips)  # FSDP2 takes the mean over the ranks
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total)
        return float(total) / world

    return step


class Live(TorchDispatchMode):
    """The most bytes of tensors alive at once: those from before, and all that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, StorageWeakRef] = {}
        for value in gc.get_objects():
            if issubclass(type(value), Tensor):
                self._see(value)
        self.peak = self._bytes()

    def _see(self, value: Tensor) -> None:
        local = value.to_local() if isinstance(value, DTensor) else value
        if local.device.type == "cpu" and type(local) in (Tensor, torch.nn.Parameter):
            storage = local.untyped_storage()
            self._storages[storage._cdata] = StorageWeakRef(storage)

    def _bytes(self) -> int:
        total, gone = 0, []
        for key, ref in self._storages.items():
            storage = torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
            if storage is None:
                gone.append(key)
            else:
                total += storage.nbytes()
        for key in gone:
            del self._storages[key]
        return total

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        self.peak = max(self.peak, self._bytes())
        return result


def resident(kind: str) -> float:
    """MiB of this process, by the name of a line in its status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) / 1024
    raise ValueError(kind)


def timed(steps: dict[str, Step], rounds: int, device: torch.device) -> dict[str, list[float]]:
    """ms of every round on the slowest rank."""
    names, rng = list(steps), random.Random(0)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds + 2):
        losses = {}
        rng.shuffle(names)
        for name in names:
            dist.barrier()
            started = time.perf_counter()
            losses[name] = steps[name](number)
            times[name].append((time.perf_counter() - started) * 1e3)
        low, high = min(losses.values()), max(losses.values())
        if high - low > 1e-4 * abs(low):
            raise SystemExit(f"the two do not train alike: {losses}")
    every = torch.tensor([times[name][2:] for name in sorted(times)], dtype=torch.float64)
    slowest = torch.stack(gather(every)).amax(0).tolist()
    return dict(zip(sorted(times), slowest, strict=True))


def memory(make: Callable[[Executable], Step], executable: Executable, device: torch.device) -> Memory:
    """Of the rank with most; a first step has warmed up."""
    gc.collect()
    idle = resident("VmRSS")
    step = make(executable)
    for number in range(3):
        step(number)
    peak = resident("VmHWM")
    with Live() as live:
        step(3)
    own = torch.tensor([live.peak / MIB, peak - idle], dtype=torch.float64)
    return Memory(*torch.stack(gather(own)).amax(0).tolist())


def uneven(executable: Executable) -> str:
    """What becomes of a step in which rank 0 has two micro-batches and the others one."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=LIMIT_S), dist.group.WORLD)
    step = fsdp_step(executable, 2 if dist.get_rank() == 0 else 1)
    started = time.perf_counter()
    try:
        step(0)
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[0][:120]
        return f"hangs; rank {dist.get_rank()} gave up after {time.perf_counter() - started:.1f} s: {reason}"
    return f"ended after {time.perf_counter() - started:.1f} s"


def main(folder: str, what: str, rounds: str) -> None:
    place = Path(folder)

    def work(device: torch.device) -> None:
        executable = read_executable(place / "build")
        result: object
        if what == "times":
            result = timed({"ours": our_step(executable), "theirs": fsdp_step(executable)}, int(rounds), device)
        elif what == "uneven":
            result = uneven(executable)
        else:
            result = memory(our_step if what == "ours" else fsdp_step, executable, device)
        if dist.get_rank() == 0:
            text = result if isinstance(result, str) else json.dumps(msgspec.to_builtins(result))
            (place / f"{what}.json").write_text(text)

    as_rank(work, cpu=True)


if __name__ == "__main__":
    exit_with(lambda: main(*sys.argv[1:]))
