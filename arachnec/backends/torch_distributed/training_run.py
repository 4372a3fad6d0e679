"""The steps of a run on one rank: a plan for each, carried out, measured and reported."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from arachnec.backends.cascade_step import DTYPES, build_encoders, build_model, gradients_of, trained_parameters
from arachnec.backends.executable import MODEL, Executable
from arachnec.backends.timeline import planned, read_measured
from arachnec.backends.timeline_svg import draw
from arachnec.backends.torch_distributed import checkpoint, events, report
from arachnec.backends.torch_distributed.agreement import agree, gather, gather_text, share_weights
from arachnec.backends.torch_distributed.channels import directed_channels, wanted_groups
from arachnec.backends.torch_distributed.clock import Clock, Interval
from arachnec.backends.torch_distributed.interpreter import Equipment, Iteration, program_of, run_iteration
from arachnec.backends.torch_distributed.optimizer import Optimizer
from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.backends.torch_distributed.plans import Plans
from arachnec.backends.torch_distributed.sequence import Sequences
from arachnec.backends.torch_distributed.specs import Specs
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Module
from arachnec.kernels.process_groups import ProcessGroups


@dataclass
class Progress:
    """How far this process has come."""

    steps: list[report.StepReport] = field(default_factory=list)
    intervals: list[Interval] = field(default_factory=list)


def train(executable: Executable, options: RunOptions, device: torch.device) -> None:
    """Carry out ``options.steps`` optimizer steps; every rank of the default process group calls this.

    Raises ``UserError``, on every rank or on the one it concerns, for anything that keeps the run from going on.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    training = options.training(executable.training)
    agree(executable.digests | {"the options": events.digest(repr(training))}, device)
    model_file = executable.model_file()
    model = build_model(model_file, training, device)
    share_weights(model)
    parameters = trained_parameters(model)
    optimizer = Optimizer(parameters, training)
    encoders = build_encoders(model_file, training, device)
    done = _resume(executable, options, optimizer, model)
    groups = ProcessGroups()
    clips = dict(enumerate(executable.clips))
    specs = Specs(model_file, encoders, device)
    dtype = None if training.dtype == "fp32" else DTYPES[training.dtype]
    sequences = Sequences(model_file, model, executable.clips, dtype)
    plans = Plans(executable, rank, world, device)
    channels: dict[tuple[int, int], dist.ProcessGroup] = {}
    count = options.steps or executable.header.iterations
    progress = Progress()
    events.emit(report.Start(world, _describe(device), done, count))
    if device.type == "cpu" and not planned_for_cpu(executable):
        events.emit(report.Note(f"planned for another device, run on {_describe(device)}: planned times do not apply"))
    try:
        for step in range(done, done + count):
            number = step % executable.header.iterations
            module, exposed = plans.get(number, following=(step + 1) % executable.header.iterations)
            groups.ensure(wanted_groups(module))
            channels |= directed_channels(module, channels, device)
            sequence = sequences.for_program(module)
            equipment = Equipment(
                rank, device, model_file, model, parameters, encoders, sequence, optimizer, groups, channels, training
            )
            received = specs.received(module, program_of(module, rank), clips)
            own = Iteration.of(module, rank, clips, received, step)
            last = step == done + count - 1
            saving = options.save_gradients if last and rank == 0 else None
            progress.intervals = _step(equipment, own, number, exposed, saving, progress)
            if options.checkpoint and (last or (options.every and (step + 1) % options.every == 0)):
                position = checkpoint.Position(step + 1, training.seed, executable.digests[MODEL])
                checkpoint.save(options.checkpoint, _state(optimizer, model), position)
    finally:
        plans.close()
    _finish(executable, options, device, module, done + count - 1, progress)


def _step(
    equipment: Equipment,
    own: Iteration,
    number: int,
    exposed: float,
    save_gradients: Path | None,
    progress: Progress,
) -> list[Interval]:
    """Run one iteration, put together what all ranks measured, and report it. Returns this rank's intervals."""
    device = equipment.device
    dist.barrier()
    clock = Clock(equipment.rank, device)
    started = time.perf_counter()
    run = run_iteration(equipment, own, clock, _saver(save_gradients))
    intervals = clock.intervals()
    elapsed = (time.perf_counter() - started) * 1e3
    mine = [run.loss, elapsed, report.busy_ms(intervals), report.peak_memory_gib(device), run.norm or 0.0]
    everyone = torch.stack(gather(torch.tensor(mine, dtype=torch.float64), device))
    module = own.module
    step_ms = float(everyone[:, 1].max())
    event = report.StepReport(
        step=own.step,
        iteration=number,
        loss=float(everyone[:, 0].sum()),
        gradient_norm=float(everyone[:, 4].max()),
        step_ms=step_ms,
        planned_ms=report.planned_ms(module),
        imbalance=report.imbalance(everyone[:, 2].tolist()),
        tokens_per_s=sum(clip.tokens for clip in module.clips) / step_ms * 1e3,
        exposed_planning_ms=exposed,
        peak_memory_gib=float(everyone[:, 3].max()),
        cascades=len(module.cascades),
    )
    progress.steps.append(event)
    events.emit(event)
    return intervals


def _saver(path: Path | None) -> Callable[[Mapping[str, Tensor]], None] | None:
    if path is None:
        return None

    def save(parameters: Mapping[str, Tensor]) -> None:
        from safetensors.torch import save_file

        path.parent.mkdir(parents=True, exist_ok=True)
        save_file({name: value.cpu().contiguous() for name, value in gradients_of(parameters).items()}, path)

    return save


def _finish(
    executable: Executable, options: RunOptions, device: torch.device, module: Module, last: int, progress: Progress
) -> None:
    """Write the timeline of the last step, the report, and the pictures."""
    rows = gather_text(msgspec.json.encode(progress.intervals).decode(), device)
    if dist.get_rank() != 0:
        return
    intervals = [interval for row in rows for interval in msgspec.json.decode(row, type=list[Interval])]
    measured = report.Measured(last, intervals)
    place = executable.folder / "measured.json"
    report.write_json(place, measured)
    picture = draw(module, planned(module), read_measured(place))
    place.with_suffix(".svg").write_text(picture, encoding="utf-8")
    summary = report.run_report(dist.get_world_size(), _describe(device), progress.steps)
    report.write_json(options.report or executable.folder / "run.json", summary)


def _state(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Everything that the next step depends on, as tensors."""
    return optimizer.tensors() | {f"buffer/{name}": value for name, value in model.named_buffers()}


def _resume(executable: Executable, options: RunOptions, optimizer: Optimizer, model: nn.Module) -> int:
    """Optimizer steps done before this run."""
    if not options.resume or options.checkpoint is None:
        return 0
    position = checkpoint.load(options.checkpoint, _state(optimizer, model), executable.digests[MODEL])
    optimizer.round_parameters()
    seed = options.training(executable.training).seed
    if position.seed != seed:
        difference = f"it draws with seed {position.seed}, this run with {seed}"
        raise UserError(checkpoint.ForeignCheckpoint(None, str(options.checkpoint), difference))
    return position.steps


def _describe(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def planned_for_cpu(executable: Executable) -> bool:
    """Whether the executable's cluster is one of CPUs."""
    cluster = executable.program.cluster
    return cluster is not None and cluster.attrs.get("device") == "cpu"
