"""Training as an iterator of steps: in somebody's own loop, and under ``arachnec run``.

docs/own_loop.md says how it is used. What a step does is ``Trainer``; here it is decided where batches come from, when
the run ends, and when checkpoints are written.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from arachnec.backends.torch_distributed.batches.own_batches import Compiling, own_executable
from arachnec.backends.torch_distributed.checkpoints import checkpoint
from arachnec.backends.torch_distributed.checkpoints.initial_run import end_of_job, newest_checkpoint
from arachnec.backends.torch_distributed.executor.attention import attention_by_grid, precision_of
from arachnec.backends.torch_distributed.executor.iteration import program_of
from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.backends.torch_distributed.plans.stage_counts import says_other_stages
from arachnec.backends.torch_distributed.plans.step_plans import planned_for_cpu
from arachnec.backends.torch_distributed.reporting import events, report
from arachnec.backends.torch_distributed.reporting.logs import StepLog, metrics_of
from arachnec.backends.torch_distributed.reporting.run_files import write_measured
from arachnec.backends.torch_distributed.run.training_run import Trainer
from arachnec.cluster.file import parse_cluster
from arachnec.cluster.topology import cluster_for
from arachnec.data.batch_source import BatchSource
from arachnec.data.clip import VideoClip
from arachnec.executable.batches import Batches
from arachnec.executable.folder import Executable
from arachnec.executable.training_options import Schedule, Training
from arachnec.ir.diagnostic import UserError, counted, user_error
from arachnec.ir.nodes import Cluster
from arachnec.launch.ending import StopRequest, exit_code
from arachnec.launch.own_script import OwnScript, before_joining
from arachnec.launch.phases import Enter, unwatched
from arachnec.launch.start_times import StartClock, StartTimes
from arachnec.models.file import ModelFile, load_model_file
from arachnec.models.given_module import given_module, with_own_optimizer
from arachnec.optimizers.own_scripts import advance, demand_rates, own_schedule, step_schedule
from arachnec.optimizers.recipe import UserOptimizer
from arachnec.optimizers.schedules import unwanted_schedule_error
from arachnec.runtime.agreement import agree
from arachnec.runtime.device_runtime import DeviceRuntime
from arachnec.runtime.out_of_memory import explained_memory
from arachnec.runtime.told_batches import CannotDraw
from arachnec.views.planned_and_measured import cost_sources, differs, run_note

COUNTS = ("steps", "every", "keep", "max_skipped")
OF_MANIFESTS = ("epochs", "more")  # where batches come from the caller, `steps` are those of this call
PATHS = ("train", "save_gradients", "save_lists", "replay_lists", "report", "init", "checkpoint")
TIMEOUTS = ("start_timeout", "plan_timeout", "step_timeout", "stall_timeout")
COUNT = "whole number of at least 1"
Scheduler = Callable[[torch.optim.Optimizer], Any]


def bad_option_error(name: str, value: object, wanted: str) -> UserError:
    return user_error(f"Engine's `{name}` is {value!r}", help=f"give a {wanted}, or leave it out")


@dataclass(frozen=True)
class EngineStep:
    """One optimizer step. ``loss`` is the mean over the batch's clips, nan for a step that was skipped; ``metrics`` are
    the numbers of ``report``."""

    number: int
    loss: float
    metrics: Mapping[str, float]
    clips: tuple[VideoClip, ...]
    report: report.StepReport


class Engine:
    """Trains on batches that it is given; ``for step in engine`` takes one optimizer step each time.

    ``model`` is the path of a model file, or a ``torch.nn.Module`` with ``sample`` and ``loss`` (and ``encoders``).
    ``batches`` gives batches of clips, or single clips of which ``batch`` make one; rank 0 alone draws from it.
    ``cluster`` is a file or a short form such as ``2x8:h100-80g``; without, the ranks are on CPUs of this machine.
    ``optimizer`` makes a torch optimizer of the parameters, ``scheduler`` a learning rate schedule of that. ``options``
    are those of ``arachnec run``: steps, checkpoint, every, keep, resume, dtype, train, settings, ...

    Every rank makes it, alike. Raises ``UserError`` for every mistake in the input.
    """

    def __init__(
        self,
        model: str | Path | nn.Module,
        batches: object = None,
        *,
        cluster: str | Path | None = None,
        optimizer: UserOptimizer | None = None,
        scheduler: Scheduler | None = None,
        sample: Callable[..., Any] | None = None,
        loss: Callable[..., Any] | None = None,
        encoders: Callable[[], dict[str, nn.Module]] | None = None,
        passes: str = "default",
        batch: int | None = None,
        **options: Any,
    ) -> None:
        self._looked_at = True  # between steps, by the loop that this is in
        clock = StartClock()
        with before_joining():
            _demand_count("batch", batch)
            own = run_options(options)
            _demand_kind("cluster", cluster, str | os.PathLike, "cluster file or a short form such as 4:cpu")
            _demand_kind("passes", passes, str, "pipeline as text")
            machine = parse_cluster(cluster if cluster is not None else f"{_world()}:cpu")
        self._script = OwnScript.join(machine, own.start_timeout)
        self._stops = self._script.stops_after_step
        own = replace(_resuming(own, self._script.restarted), steps=None, more=own.steps)
        clock.done("group")
        enter = self._script.enter
        file = load_model_file(model) if isinstance(model, str | Path) else given_module(model, sample, loss, encoders)
        file = file if optimizer is None else with_own_optimizer(file, optimizer)
        resumed = newest_checkpoint(own)
        source = BatchSource(batches, batch, repeat=own.more is not None) if dist.get_rank() == 0 else None
        training = own.training(Training())
        if scheduler is not None and training.schedule != Schedule():
            raise unwanted_schedule_error(training.schedule, "Engine has a `scheduler`", "keep one of them")
        given, machine = machine, cluster_for(machine, dist.get_world_size())
        position = None if resumed is None else resumed.position
        compiling = Compiling(file, machine, passes, training)
        clock.done("reading")
        executable, drawn = own_executable(self._script.folder(), compiling, source, position)
        clock.done("plan")
        self._begin(
            own,
            device=self._script.device,
            executable=executable,
            enter=enter,
            batches=drawn,
            resumed=resumed,
            model_file=file,
            scheduler=scheduler,
            clock=clock,
        )
        if training.schedule == Schedule():
            self.trainer.leave_rates()  # to the scheduler, or to the loop that this is in
        agree({"the model and its functions": file.digest, "the optimizer": self.trainer.told_optimizer})
        of_ranks, of_device = _notes_of_ranks(given, machine), _notes_of_device(executable, self._script.device)
        for note in (*self._script.notes, *of_ranks, *of_device):
            events.emit(report.Note(note))

    @classmethod
    def of(
        cls,
        executable: Executable,
        options: RunOptions,
        device: torch.device,
        enter: Enter = unwatched,
        *,
        restarted: bool = False,
        clock: StartClock | None = None,
        stops: Callable[[], StopRequest | None] | None = None,
    ) -> Engine:
        """The engine of an executable, whose batches come again and again. Every rank of the default process group
        makes it. One that its launcher has ``restarted`` goes on from the newest whole checkpoint to where it was to
        end. ``clock`` knows what this rank's start took before; ``stops`` begins to note signals that ask it to end."""
        engine = cls.__new__(cls)
        engine._stops = stops or (lambda: None)
        engine._looked_at = False
        engine._script = OwnScript(device, restarted=restarted)
        given = _resuming(options, restarted)
        engine._begin(given, device=device, executable=executable, enter=enter, clock=clock)
        return engine

    def _begin(
        self,
        options: RunOptions,
        *,
        device: torch.device,
        executable: Executable,
        enter: Enter,
        batches: Batches | None = None,
        resumed: checkpoint.Whole | None = None,
        model_file: ModelFile | None = None,
        scheduler: Scheduler | None = None,
        clock: StartClock | None = None,
    ) -> None:
        self._executable, self._options, self._enter = executable, options, enter
        program = executable.program
        with explained_memory(DeviceRuntime.of(device), program, program_of(program, dist.get_rank())):
            self.trainer = Trainer(executable, options, device, enter, batches, resumed, model_file, clock)
        self.done = self.first = self.trainer.done  # optimizer steps
        self.steps: list[report.StepReport] = []  # of this run
        one_pass = self.trainer.end_of(1) if batches is None else None
        self.end = end_of_job(options.checkpoint, self.first, self._asked(), one_pass, restarted=self._script.restarted)
        self.stopped_by = 0  # the signal that has ended the loop after a step
        self._saved = self.first
        self._closed = self._left = False
        self._log = StepLog()
        self.scheduler = None if scheduler is None else own_schedule(scheduler, self.optimizer)
        if self.scheduler is not None:
            advance(self.scheduler, self.first)
            self.trainer.leave_rates()
        self._enter("your own code")

    def _asked(self) -> int | None:
        """The steps in all that the options ask for."""
        options = self._options
        if options.more is not None:
            return self.first + options.more
        return options.steps if options.epochs is None else self.trainer.end_of(options.epochs)

    @property
    def model(self) -> nn.Module:
        """The module in training, with the latest update. One rank may look alone.

        A rank of a pipeline has the parameters of its stages only, one of a cell none but while a layer runs:
        ``model_is_whole`` says so, and a checkpoint has them all.
        """
        self.trainer.finish_gathers()
        return self.trainer.model

    @property
    def model_is_whole(self) -> bool:
        """Whether `model` has every parameter on this rank between steps: no stages, cells or layers in host memory."""
        return self.trainer.model_is_whole

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The torch optimizer, over this rank's parts of the parameters or their fp32 copies."""
        return self.trainer.optimizer

    @property
    def start_times(self) -> StartTimes:
        """What this rank's start took, part by part; known behind the first step."""
        return self.trainer.clock.times()

    @property
    def plans_reused(self) -> int:
        """Batches that needed no plan of their own, because one of the same shapes had been planned."""
        return self.trainer.plans_reused

    def __iter__(self) -> Iterator[EngineStep]:
        """Take steps until the batches end, or ``steps`` are done. Then the last checkpoint is written; so it is where
        the loop is left by ``break``, which all ranks do behind the same step. It cannot be begun again then.

        Raises ``UserError`` for a mistake, after what was trained before it is in the checkpoint.
        """
        if self._left:
            raise user_error(
                f"this Engine's loop was left after {counted(self.done - self.first, 'step')}, and it takes no more",
                help="make another one, with checkpoint= and resume=True: a loop that is left writes a checkpoint",
            )
        if self._closed:
            return
        try:
            self._log = self.trainer.step_log(self.end)
            if self._options.checkpoint is not None:
                self.trainer.stop = self._stops() or self.trainer.stop
            while self.end is None or self.done < self.end:
                step = self._step(last=self.end is not None and self.done + 1 == self.end)
                if step is None:
                    break
                yield step
                if self.stopped_by:
                    break
            self._save_last()
            self.trainer.finish_gathers()
            if self.stopped_by:
                self._end_stopped()
            elif self.end is not None and self.done < self.end:
                done, wanted = (counted(count, "step") for count in (self.done - self.first, self.end - self.first))
                kept = (
                    "what was trained so far is in the checkpoint" if self._options.checkpoint else "nothing was kept"
                )
                raise user_error(
                    f"the batches ended after {done}, and {wanted} were asked for",
                    help=f"give a dataset that can be begun again instead of an iterator, or leave `steps` out; {kept}",
                )
        except GeneratorExit:
            self._leave()
            raise
        finally:
            self.close()

    def _end_stopped(self) -> None:
        """Tell of the checkpoint that a signal has asked for; somebody's own script ends here."""
        after = f"ended by a signal after {counted(self.done, 'step')}"
        events.emit(report.Note(f"{after}: --resume goes on from the checkpoint in {self._options.checkpoint}"))
        if self._looked_at:
            self.close()
            sys.exit(exit_code(self.stopped_by))

    def _leave(self) -> None:
        """The loop was left before its end: the other ranks are to do so too, and what was trained is kept."""
        self._left = True
        if dist.is_initialized():  # at the end of a script a generator may outlive its process group
            self._script.leaves()
            self._save_last()
            self.trainer.finish_gathers()

    def _step(self, *, last: bool) -> EngineStep | None:
        saving = self._options.save_gradients if last else None
        if self.scheduler is not None:
            with self._saved_before(UserError):
                demand_rates(self.optimizer, self.done)
        self._script.begins(self.done)
        with self._saved_before(CannotDraw):
            took = self.trainer.step(self.done, save_gradients=saving, last=last)
        if took is None:
            return None
        self.done += 1
        self.steps.append(took)
        self._log.tell(took)
        if self.scheduler is not None:
            with self._saved_before(UserError):
                step_schedule(self.scheduler)
        every = self._options.every
        self.stopped_by = self.trainer.stopped_by
        due = last or bool(self.stopped_by) or bool(every and self.done % every == 0)
        self.trainer.saves(self.done, due)
        if due:
            self._saved = self.done
        if self._looked_at:
            self.trainer.start_gathers()
        self._enter("your own code")
        loss = math.nan if took.loss is None else took.loss
        metrics = {"loss": math.nan, "gradient_norm": math.nan, **metrics_of(took)}
        return EngineStep(took.step, loss, metrics, self.trainer.clips, took)

    @contextmanager
    def _saved_before(self, mistake: type[UserError]) -> Iterator[None]:
        """What was trained before a mistake inside is kept."""
        try:
            yield
        except mistake:
            self._save_last()
            raise

    def _save_last(self) -> None:
        """A checkpoint of the last step, where there is none, and wait until it is whole."""
        if self.done > self._saved:
            self.trainer.saves(self.done, True)
            self._saved = self.done
        self.trainer.finish_saving()

    def close(self) -> None:
        """End what runs beside the steps. The loop does so at its end."""
        if not self._closed:
            self._closed = True
            self._log.close()
            self.trainer.close()
            self._script.remove_folder()
            if self._looked_at:
                self._script.stops_at_once(acted=bool(self.stopped_by))


def run_options(options: Mapping[str, Any]) -> RunOptions:
    """The options of a run by their names. Raises ``UserError`` for one that there is not."""
    known = [field.name for field in fields(RunOptions) if field.name not in OF_MANIFESTS]
    for name in options:
        if name not in known:
            raise user_error(f"Engine has no option `{name}`", help=f"its options are {', '.join(known)}")
    for name in COUNTS:
        _demand_count(name, options.get(name))
    for name in ("resume", "every"):
        if options.get(name) and options.get("checkpoint") is None:
            raise user_error(
                f"Engine's `{name}` needs the folder of the checkpoints",
                help=f"add checkpoint=FOLDER, or leave `{name}` out",
            )
    for name in PATHS:
        _demand_kind(name, options.get(name), str | os.PathLike, "path")
    for name in TIMEOUTS:
        seconds = options.get(name)
        _demand_kind(name, seconds, int | float, "number of seconds above 0")
        if seconds is not None and not 0 < seconds < math.inf:
            raise bad_option_error(name, seconds, "number of seconds above 0")
    given: dict[str, Any] = {n: Path(v) if n in PATHS and v is not None else v for n, v in options.items()}
    settings = given.get("settings") or ()
    for setting in settings if isinstance(settings, list | tuple) else (settings,):
        _demand_kind("settings", setting, str, "list of texts, each KEY=VALUE")
    return RunOptions(**{**given, "settings": (settings,) if isinstance(settings, str) else tuple(settings)})


def _demand_count(name: str, value: object) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise bad_option_error(name, value, COUNT)


def _demand_kind(name: str, value: object, kind: Any, wanted: str) -> None:
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool)):
        raise bad_option_error(name, value, wanted)


def _resuming(options: RunOptions, restarted: bool) -> RunOptions:
    return replace(options, resume=True) if restarted and options.checkpoint is not None else options


def _world() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _notes_of_ranks(given: Cluster, running: Cluster) -> list[str]:
    if given.world == running.world:
        return []
    ranks = f"the cluster has {counted(given.world, 'rank')}, and the script runs as {running.world}"
    return [f"{ranks}: planned for {running.world}; torchrun starts a process for each rank"]


def _notes_of_device(executable: Executable, device: torch.device) -> list[str]:
    if device.type != "cpu" or planned_for_cpu(executable):
        return []
    return ["planned for another device, run on the CPU: planned times do not apply"]


def train(
    executable: Executable,
    options: RunOptions,
    device: torch.device,
    enter: Enter = unwatched,
    notes: Sequence[str] = (),
    *,
    restarted: bool = False,
    clock: StartClock | None = None,
    stops: Callable[[], StopRequest | None] | None = None,
) -> int:
    """What ``arachnec run`` does on a rank: every step of an engine is reported, and the last to be looked at. Returns
    the signal that has ended it after a step, or 0.

    Raises ``UserError``, on every rank or on the one it concerns, for anything that keeps the run from going on.
    """
    engine = Engine.of(executable, options, device, enter, restarted=restarted, clock=clock, stops=stops)
    trainer = engine.trainer
    assert engine.end is not None, "an executable's batches never end"
    events.emit(
        report.Start(
            dist.get_world_size(),
            DeviceRuntime.of(device).name(),
            engine.done,
            max(0, engine.end - engine.done),
            cost_sources(trainer.module),
        )
    )
    stages = says_other_stages(executable.program, trainer.module)
    for note in (
        *_notes_of_device(executable, device),
        *notes,
        *([] if stages is None else [stages]),
        *trainer.notes(),
        *([] if stops is None or options.checkpoint is None else [trainer.note_of_grace()]),
    ):
        events.emit(report.Note(note))
    for step in engine:
        events.emit(step.report)
        if len(engine.steps) == 1:
            events.emit(report.Note(engine.start_times.text()))
        times = step.report.planned_ms, step.report.step_ms
        if len(engine.steps) == min(2, engine.end - engine.first) and differs(*times):  # the first of several warms up
            events.emit(report.Note(run_note(*times, cost_sources(trainer.module))))
    enter("report", trainer.timeouts.of_start(trainer.module), "--start-timeout")
    if not engine.steps:
        told = f"all {counted(engine.end, 'step')} were done before"
        events.emit(report.Note(f"{told}: --steps and --epochs say how many in all, --more how many beyond these"))
        trainer.close_groups()
        return 0
    peak = report.peak_memory_gib(DeviceRuntime.of(device))
    write_measured(executable, trainer.module, engine.steps[-1], trainer.intervals, peak)
    if dist.get_rank() == 0:
        summary = report.run_report(
            dist.get_world_size(),
            DeviceRuntime.of(device).name(),
            engine.steps,
            attention_by_grid(trainer.module, precision_of(trainer.model), device),
            plans_reused=engine.plans_reused,
            sparse_layers=trainer.sparse_layers,
            start=engine.start_times,
            costs=cost_sources(trainer.module),
        )
        report.write_json(options.report or executable.folder / "run.json", summary)
    trainer.close_groups()
    return engine.stopped_by
