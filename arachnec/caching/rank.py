"""One rank's part of encoding a manifest: its share of every batch, written clip by clip."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from arachnec.backends.cascade_step import encode_loaded
from arachnec.backends.torch_distributed.batches.load_ahead import LoadAhead, encoded_here
from arachnec.backends.torch_distributed.executor.iteration import program_of
from arachnec.backends.torch_distributed.plans.step_plans import Planned, Plans, StepLimits
from arachnec.backends.torch_distributed.reporting import events, report
from arachnec.backends.torch_distributed.weights.encoder_setup import DividedEncoders, rank_encoders
from arachnec.caching.files import DIVIDED, EncodedFiles, add_rows, divided_in
from arachnec.cost.compute import is_divided
from arachnec.data.clip import VideoClip
from arachnec.executable.folder import Executable
from arachnec.ir.diagnostic import counted
from arachnec.ir.nodes import Cascade, Instruction, Module
from arachnec.kernels.attention.process_groups import ProcessGroups
from arachnec.launch.phases import GROUP_TIMEOUT, Enter, Timeouts, unwatched
from arachnec.models.encoders import running_encoders
from arachnec.runtime.agreement import agree, gather_values
from arachnec.runtime.device_runtime import DeviceRuntime
from arachnec.runtime.rank_resources import RankThreads, wanted_groups
from arachnec.runtime.step_progress import Clock, StepProgress
from arachnec.spmd.spatial.peers import Group

SET_ASIDE = "set_aside.jsonl"
NOT_FINITE = "what its encoder gave is not finite"
CPU = torch.device("cpu")
DERIVED = Timeouts()


class SetAside(msgspec.Struct, frozen=True):
    """A clip that could not be encoded, by its position in the executable, and why."""

    clip: int
    reason: str


def encode_batches(
    executable: Executable,
    files: EncodedFiles,
    init: Path | None,
    device: torch.device,
    enter: Enter = unwatched,
    timeouts: Timeouts = DERIVED,
) -> None:
    """Encode every clip of the executable, batch by batch as planned. Every rank of the default group calls it.

    Clips that cannot be read are noted beside the executable. Raises ``UserError`` for what no clip is to blame for.
    """
    enter("start", timeouts.of_start(executable.program), "--start-timeout")
    rank, count = dist.get_rank(), executable.header.iterations
    agree(executable.digests)
    model_file = running_encoders(executable.model_file(), files.encoders)
    encoders, divided = rank_encoders(
        model_file, executable.training, executable.program, executable.clips[0], device, init
    )
    runtime, threads = DeviceRuntime.of(device), RankThreads()
    plans, limits = Plans(executable, rank, dist.get_world_size()), StepLimits.of(timeouts, executable, device)
    work = _Work(files, device, encoders, LoadAhead(threads.loads, encoders, runtime), divided, executable)
    done = 0
    try:
        for number in range(count):
            enter(f"the plan of batch {number}", timeouts.of_plan(), "--plan-timeout")
            planned = plans.get(number)
            assert planned is not None, "an executable's batches never end"
            if number + 1 < count:
                plans.prepare(number + 1)
            work.join(planned.module)
            began = time.perf_counter()
            aside = work.encode(planned, enter, limits.of_instructions(planned))
            limits.took(planned, (time.perf_counter() - began) * 1e3)
            done += len(planned.clips)
            _note(executable.folder, aside, rank)
            if rank == 0:
                add_rows(executable.folder / DIVIDED, divided_in(planned.module, planned.clips))
            events.emit(report.Note(f"{done} of {counted(len(executable.clips), 'clip')}"))
        enter("the manifest")
    finally:
        plans.close()
        threads.close()


def _note(folder: Path, aside: Sequence[SetAside], rank: int) -> None:
    """Rank 0 writes down what all ranks set aside. Collective."""
    everyone = gather_values(list(aside), list[SetAside])
    if rank == 0:
        add_rows(folder / SET_ASIDE, (row for rows in everyone for row in rows))


@dataclass
class _Work:
    files: EncodedFiles
    device: torch.device
    encoders: dict[str, torch.nn.Module]
    loads: LoadAhead
    divided: DividedEncoders
    executable: Executable
    groups: ProcessGroups = field(default_factory=lambda: ProcessGroups(GROUP_TIMEOUT))
    hosts: ProcessGroups = field(default_factory=lambda: ProcessGroups(GROUP_TIMEOUT))

    def join(self, module: Module) -> None:
        """Make the groups of a plan that earlier ones did not have. Collective."""
        self.groups.ensure(wanted_groups(module), device=self.device)
        self.hosts.ensure(wanted_groups(module), device=CPU)

    def encode(self, planned: Planned, enter: Enter, limit: Callable[[Instruction], float]) -> list[SetAside]:
        """This rank's part of a batch; the clips that it could not encode."""
        module, clips = planned.module, planned.clips
        program = program_of(module, dist.get_rank())
        clock = Clock(program.rank, DeviceRuntime.of(self.device))
        progress = StepProgress(module, program.rank, planned.step, clips, clock, limit)
        enter(f"batch {planned.step}", progress=progress)
        cascades = {cascade.name: cascade for cascade in module.cascades}
        stages = {stage.name: stage for stage in module.stages}
        self.loads.want(planned.step, encoded_here(program, cascades, clips))
        aside: list[SetAside] = []
        for index, step in enumerate(program.instructions):
            progress.at(index)
            if step.op != "encode":
                continue
            cascade, ranks = cascades[step.target], step.peers or (program.rank,)
            together = is_divided(cascade, stages[cascade.stage], len(ranks))
            for id in cascade.clips:
                value = self._encoded(cascade, clips[id], planned.step, ranks if together else (program.rank,))
                if program.rank != ranks[0]:
                    continue
                if value is None:
                    aside.append(SetAside(id, self.loads.unreadable.get(clips[id].id, "another rank cannot read it")))
                elif value.is_floating_point() and not bool(value.isfinite().all()):
                    aside.append(SetAside(id, NOT_FINITE))
                else:
                    self.files.write(cascade.stage, clips[id], value)
        progress.at(len(program.instructions))
        return aside

    def _encoded(self, cascade: Cascade, clip: VideoClip, step: int, ranks: tuple[int, ...]) -> Tensor | None:
        """What the encoder gives for a clip, by these ranks together; None where one of them cannot read it."""
        loaded = self.loads.take_readable(step, cascade.stage, clip)
        encoder = self.encoders[cascade.stage]
        if len(ranks) == 1:
            return None if loaded is None else encode_loaded(encoder, [loaded])
        unreadable = torch.tensor([loaded is None], dtype=torch.int32)
        dist.all_reduce(unreadable, group=self.hosts.get(ranks))
        if int(unreadable) or loaded is None:
            return None
        peers = Group(ranks, ranks.index(dist.get_rank()), self.groups.get(ranks))
        return self.divided.encode(self.executable.model_file(), cascade.stage, encoder, loaded, peers)
