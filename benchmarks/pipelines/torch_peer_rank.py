"""One rank of `torch_peer.py`: a step of ours and one of torch's, in turns."""

from __future__ import annotations

import cProfile
import json
import pstats
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

from arachnec.backends.staged_model import parts_of
from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.backends.torch_distributed.run.training_run import Trainer
from arachnec.executable.folder import Executable, read_executable
from arachnec.ir.stage_sizes import layers_of
from arachnec.launch.ending import exit_with
from arachnec.launch.ranks import as_rank
from arachnec.models.batch import clip_generator
from arachnec.runtime.agreement import gather
from benchmarks.pipelines.torch_peer import PEERS, Peer

Step = Callable[[int], float]
V = ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")  # a rank has a stage of the first half and its mirror image


class Part(nn.Module):
    """A run of the model's blocks, with what lies before the first and behind the last."""

    def __init__(self, model: nn.Module, blocks: range) -> None:
        super().__init__()
        first, last = blocks.start == 0, blocks.stop == len(model.blocks)
        self.embed = model.embed if first else nn.Identity()
        self.blocks = nn.ModuleList([model.blocks[number] for number in blocks])
        self.head = nn.Sequential(model.norm, model.head) if last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def blocks_of(executable: Executable) -> list[range]:
    """The blocks of every stage."""
    numbers = [[int(path.rpartition(".")[2]) for path, _ in layers_of(stage)] for stage in parts_of(executable.program)]
    return [range(own[0], own[-1] + 1) for own in numbers]


def torch_step(peer: Peer, executable: Executable, cuts: list[range]) -> Step:
    """A training step of torch.distributed.pipelining over the clips of an executable, each as long as the longest."""
    model_file, training, clips = executable.model_file(), executable.training, executable.clips
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(training.seed)
    model = model_file.build()
    last = len(cuts) - 1
    own = [rank] if peer.stages == 1 else [rank, last - rank if peer.name in V else rank + world]
    parts = {number: Part(model, cuts[number]) for number in own}
    stages = [PipelineStage(parts[number], number, len(cuts), torch.device("cpu")) for number in own]
    kind = getattr(schedules, peer.name)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    schedule = kind(stages[0] if single else stages, len(clips), loss_fn=model_file.loss)
    parameters = [value for part in parts.values() for value in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=training.lr, betas=(0.9, 0.95), weight_decay=0.01, fused=True)
    longest = max(clips, key=lambda clip: clip.frames)

    def step(number: int) -> float:
        inputs, targets = [], []
        if 0 in own or last in own:
            for clip in clips:
                arguments, target = model_file.sample(longest, clip_generator(training.seed, number, clip.id))
                inputs.append(arguments["x"])
                targets.append(target)
        losses: list[Tensor] = []
        given = (torch.cat(inputs),) if 0 in own else ()
        if last in own:
            schedule.step(*given, target=torch.cat(targets), losses=losses, return_outputs=False)
        else:
            schedule.step(*given, return_outputs=False)
        gradients = [value.grad for value in parameters if value.grad is not None]
        squared = torch.stack(torch._foreach_norm(gradients)).double().square().sum()
        dist.all_reduce(squared)
        torch._foreach_mul_(gradients, (training.clip_norm / (squared.sqrt().float() + 1e-6)).clamp(max=1.0))
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(losses).detach().mean() if losses else torch.zeros(())
        dist.all_reduce(loss)
        return float(loss)

    return step


def our_step(executable: Executable) -> Step:
    trainer = Trainer(executable, RunOptions(), torch.device("cpu"))
    return lambda number: trainer.step(number).loss


def timed(steps: dict[str, Step], rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """ms on this rank, and losses, of every round."""
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    losses: dict[str, list[float]] = {name: [] for name in names}
    rng = random.Random(0)
    for number in range(-2, rounds):
        rng.shuffle(names)
        for name in names:
            dist.barrier()
            started = time.perf_counter()
            losses[name].append(steps[name](number + 2))
            elapsed = (time.perf_counter() - started) * 1e3
            if number >= 0:
                times[name].append(elapsed)
    return times, losses


def show_profile(name: str, step: Step, first: int) -> None:
    """Where rank 0's training thread is in ten steps."""
    profile = cProfile.Profile()
    for number in range(first, first + 10):
        profile.enable()
        step(number)
        profile.disable()
    if dist.get_rank() == 0:
        print(name, file=sys.stderr)
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(25)


def main(folder: str, ours: str, theirs: str, rounds: str, profile: str) -> None:
    def work(device: torch.device) -> None:
        place = Path(folder)
        executables = {name: read_executable(place / name) for name in ours.split(",")}
        steps = {name: our_step(executable) for name, executable in executables.items()}
        of_stages = {len(cuts): cuts for cuts in map(blocks_of, executables.values())}
        first = next(iter(executables.values()))
        peers = {peer.name: peer for peer in PEERS}
        for name in filter(None, theirs.split(",")):
            cuts = of_stages[dist.get_world_size() * peers[name].stages]
            steps[name] = torch_step(peers[name], first, cuts)
        times, losses = timed(steps, int(rounds))
        mixed = len({clip.frames for clip in first.clips}) > 1
        expected = losses[ours.split(",")[0]]
        for name, values in losses.items():
            apart = max(abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True))
            if apart > 1e-4 and not mixed:
                raise SystemExit(f"{name} does not train as the others do: losses differ by {apart:.1e}")
        if int(profile):
            for name, step in steps.items():
                show_profile(name, step, int(rounds) + 2)
        every = torch.tensor([times[name] for name in sorted(times)], dtype=torch.float64)
        slowest = torch.stack(gather(every)).amax(0).tolist()
        if dist.get_rank() == 0:
            (place / "times.json").write_text(json.dumps(dict(zip(sorted(times), slowest, strict=True))))

    as_rank(work, cpu=True)


if __name__ == "__main__":
    exit_with(lambda: main(*sys.argv[1:]))
