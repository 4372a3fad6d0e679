"""The steps of a run on one rank: a plan for each, carried out, measured and reported."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from arachnec.backends.cascade_step import DTYPES, build_model
from arachnec.backends.torch_distributed.batches.drawn_batches import (
    demand_no_order,
    drawn_batches,
    may_grow,
    note_editions,
    run_editions,
)
from arachnec.backends.torch_distributed.batches.load_ahead import encoded_here
from arachnec.backends.torch_distributed.checkpoints import checkpoint
from arachnec.backends.torch_distributed.checkpoints.initial_run import (
    demand_average_goes_on,
    demand_same_optimizer,
    frozen_fingerprint,
    init_notes,
    kinds_left,
    newest_checkpoint,
)
from arachnec.backends.torch_distributed.executor.encoding import Ahead, Specs
from arachnec.backends.torch_distributed.executor.interpreter import run_iteration
from arachnec.backends.torch_distributed.executor.iteration import Iteration, Run, Share, program_of
from arachnec.backends.torch_distributed.executor.shared_clips import SharedBatches
from arachnec.backends.torch_distributed.executor.stage_messages import StageMessages
from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.backends.torch_distributed.plans.step_plans import (
    KEPT,
    PlanKey,
    Planned,
    Plans,
    StepLimits,
    state_beyond_plan,
)
from arachnec.backends.torch_distributed.rank.rank_context import set_up_rank
from arachnec.backends.torch_distributed.rank.sharded_blocks import Sequences
from arachnec.backends.torch_distributed.reporting import events, report
from arachnec.backends.torch_distributed.reporting.logs import STEPS_OF_A_FILE, AuditLog, StepLog
from arachnec.backends.torch_distributed.reporting.run_files import gradient_saver
from arachnec.backends.torch_distributed.run.learned_sparsity import FollowedDensities, note_of_left, with_predictors
from arachnec.backends.torch_distributed.run.samples import Samples
from arachnec.backends.torch_distributed.run.step_account import Measured, StepAccount
from arachnec.backends.torch_distributed.run.validation import MEASURES, Validation, ValidationLoss, undisturbed
from arachnec.backends.torch_distributed.weights.shared_weights import META
from arachnec.checkpoint.folder import Position
from arachnec.checkpoint.parts import ENTRIES, IN_USE, Part, State
from arachnec.data.clip import VideoClip
from arachnec.executable.batches import Batches
from arachnec.executable.folder import MODEL, Executable, planning_ms
from arachnec.executable.other_manifests import Edition, Epochs
from arachnec.ir.diagnostic import counted
from arachnec.ir.nodes import Module
from arachnec.launch.ending import StopRequest
from arachnec.launch.phases import Enter, unwatched
from arachnec.launch.start_times import StartClock
from arachnec.model_state.kept_gradients import drop_gradients, keep_gradients, says_low
from arachnec.model_state.layer_summary import LayerSummary
from arachnec.model_state.measured_layers import HISTORY
from arachnec.models.file import ModelFile
from arachnec.runtime.agreement import agree, gather_values
from arachnec.runtime.device_runtime import OnHost
from arachnec.runtime.handoffs import TensorSpec
from arachnec.runtime.replanning import LinkWatch, Notes, measured_speeds, notes_of_slow
from arachnec.runtime.step_progress import Clock, Interval, StepProgress


class Trainer:
    """A model in training on one rank: everything that stays from step to step. All methods are collective."""

    def __init__(
        self,
        executable: Executable,
        options: RunOptions,
        device: torch.device,
        enter: Enter = unwatched,
        batches: Batches | None = None,
        resumed: checkpoint.Whole | None = None,
        model_file: ModelFile | None = None,
        clock: StartClock | None = None,
    ) -> None:
        """``batches`` and ``model_file`` are the executable's own where none are given; ``resumed`` is the checkpoint
        that ``batches`` go on from; ``clock`` knows what this rank's start took before."""
        self.clock = clock or StartClock()
        self.timeouts = options.timeouts()
        self._keeps_lists = options.save_lists is not None or options.replay_lists is not None
        self._enter, self._init = enter, options.init
        self._limits = StepLimits.of(self.timeouts, executable, device)
        enter("start", self.timeouts.of_start(executable.program), "--start-timeout")
        rank, world = dist.get_rank(), dist.get_world_size()
        training = options.training(executable.training)
        told = {"the training options": training, **options.shared()}
        agree(executable.digests | {name: events.digest(repr(value)) for name, value in told.items()})
        model_file = model_file or executable.model_file()
        self._executable = executable
        fits = executable.program.cluster is not None and executable.program.cluster.world == world
        self._planning_ms = planning_ms(executable.folder) if fits else None
        more_state = state_beyond_plan(executable, model_file, training)
        noted: tuple[Edition, ...] = ()
        if batches is None:
            resumed = newest_checkpoint(options)
            done = 0 if resumed is None else resumed.position.steps * training.accumulate
            grows = may_grow(executable, training)
            editions = run_editions(options.checkpoint if grows else None, executable, done)
            batches = drawn_batches(executable, training, None if resumed is None else resumed.position, editions)
            noted = editions if grows else ()
            self._epochs = Epochs.of(editions) if grows else Epochs((0,), (executable.header.iterations,))
        else:
            demand_no_order(training)
            self._epochs = Epochs((0,), (STEPS_OF_A_FILE,))
        self._plans = Plans(
            executable,
            rank,
            world,
            batches,
            more_state=more_state,
            replans=bool(training.mix.manifests) or len(self._epochs.begins) > 1,
        )
        self.done = 0 if resumed is None else resumed.position.steps
        # Planned for this run's ranks, which need not be those that the executable was compiled for.
        self._waited = 0.0  # ms for plans since the last report
        self._each = training.accumulate  # batches of an optimizer step
        self._validation = Validation.of(executable, training, rank, world, more_state)
        self.clock.done("reading")
        self._planned = self._plan(self.done * self._each)
        self.clock.done("plan")
        assert self._planned is not None, "a run has a first batch"
        first = self._planned.module
        enter("start", self.timeouts.of_start(first), "--start-timeout")
        self._context = set_up_rank(
            model_file,
            training,
            first,
            executable.clips,
            device,
            init=options.init,
            follows_links=self._plans.follows_links,
        )
        self.clock.done("weights")
        self._samples = Samples.of(training, self._context, (options.checkpoint or executable.folder) / "samples")
        self._slowed: Mapping[int, float] = {}
        self._densities = FollowedDensities(self._plans, self._each)
        self._links = LinkWatch(changed=1)  # the first step connects and compiles
        self._specs = Specs(model_file, self._context.encoders, device)
        dtype = None if training.dtype == "fp32" else DTYPES[training.dtype]
        self._sequences = Sequences(
            model_file,
            self._context.model,
            executable.clips,
            dtype,
            partial(build_model, model_file, training, META),
            executable.fused_graphs(),
        )
        self._context = with_predictors(self._context, first, self._sequences, training, options)
        self.clock.done("blocks")
        folder, keep = options.checkpoint, options.keep
        self._frozen = "" if folder is None else frozen_fingerprint(options.init, self._context)
        self._checkpoints = None if folder is None else checkpoint.Checkpoints(folder, keep)
        if resumed is not None:
            demand_average_goes_on(resumed, training, options)
            demand_same_optimizer(resumed, self._context.optimizer.recipe.name)
        self._resume(resumed)
        if folder is not None and noted and rank == 0:
            note_editions(folder, noted)
        self.clock.done("weights")
        log = options.checkpoint or executable.folder
        audit = AuditLog(log, self._epochs.epoch, self.done * self._each) if rank == 0 else None
        self._account = StepAccount(options.max_skipped, audit, self._each)
        self._ahead: Ahead | None = None
        self._own: dict[PlanKey, Iteration] = {}  # with nothing encoded before
        self.module = first  # of the latest step
        self._ready: Module | None = None  # the program that was made ready last
        self.clips: tuple[VideoClip, ...] = ()  # of the latest optimizer step
        self.intervals: list[Interval] = []  # of the latest step on this rank
        self._shared = SharedBatches()
        self.stop: StopRequest | None = None  # where a signal is to end the run after a step
        self.plans_reused = 0  # steps that ran a plan which an earlier batch of the same shapes was given

    @property
    def model(self) -> torch.nn.Module:
        return self._context.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._context.optimizer.torch

    @property
    def told_optimizer(self) -> str:
        """A digest of the optimizer's class, groups and arguments, for ranks to compare."""
        return events.digest(self._context.optimizer.recipe.text())

    @property
    def sparse_layers(self) -> list[LayerSummary]:
        """What is known of the layers that can attend to chosen keys."""
        return [] if self._context.predictors is None else self._context.predictors.summary(self.module)

    def leave_rates(self) -> None:
        """From now on somebody else sets the learning rates."""
        self._context.optimizer.sets_rates = False

    def notes(self) -> list[str]:
        """What a person should know before the first step, of the weights that the run begins with as well."""
        unused = None
        if self._context.predictors is None and self._keeps_lists:
            unused = "no layer of the plan attends to chosen keys: no lists are saved or replayed"
        notes = says_low(self.module, self._context.parameters), unused, *self._left
        of_init = init_notes(self._init, self._context.model, self._context.encoders)
        return [*(note for note in notes if note is not None), *of_init]

    def end_of(self, epochs: int) -> int:
        """Optimizer steps in all at the end of so many passes over the manifest."""
        return -(-self._epochs.end(epochs) // self._each)

    @property
    def stopped_by(self) -> int:
        """The signal that some rank was asked to end by until the end of the latest step; 0 where there was none."""
        return self._account.stopped_by

    def note_of_grace(self) -> str:
        """What whoever ends this run should know."""
        step_ms = self._each * (0.0 if self._planned is None else self._planned.times.ends)
        grace = math.ceil(self.timeouts.grace(self.module, step_ms))
        told = "Ctrl-C and SIGTERM end this run after the step under way, with a checkpoint: give it"
        return f"{told} {grace} s of grace by the plan's numbers; a second one ends it at once"

    def step_log(self, end: int | None) -> StepLog:
        """What is told of every step. Raises ``UserError`` where the schedule does not last up to ``end``, if known."""
        context = self._context
        if end is not None:
            context.optimizer.demand_lasting(end)
        return StepLog.open(context.training, context.model_file.on_step, context.rank)

    def step(self, number: int, *, save_gradients: Path | None = None, last: bool = False) -> report.StepReport | None:
        """Plan and carry out optimizer step ``number``; put together what all ranks measured. None without a batch.

        A rank that has to wait at its end encodes for the step after it, unless it is the ``last``.
        """
        begin = number * self._each
        plans = [self._plan(begin + place) for place in range(self._each)]
        self.clock.done("plan")
        batches = [planned for planned in plans if planned is not None]
        counts = [len(planned.module.clips) for planned in batches]
        self.clips = tuple(clip for planned in batches for _, clip in sorted(planned.clips.items()))
        reports: list[report.StepReport] = []
        for place, planned in enumerate(batches):
            share = Share()
            if len(batches) > 1:
                aside = sum(len(done.set_aside) for done in reports)
                share = Share(place == 0, planned is batches[-1], counts[place] / sum(counts), sum(counts), aside)
            following = None if share.ends else batches[place + 1]
            if share.ends and not last:
                following = self._following(begin + self._each)
            reports.append(self._iterate(planned, share, following, save_gradients if share.ends else None))
        if not last:
            self._densities.follow(self._context, number)
        self._watch_links(number)
        self._follow_ranks(number)
        if not reports:
            return None
        self.clock.done("first_step")
        took = report.accumulated(number, reports, sum(counts))
        if self._samples is not None and self._samples.due(number + 1):
            self._enter(f"the samples behind step {number}")
            with self._context.optimizer.in_use():
                self._samples.write(number, self.module)
        due = self._validation is not None and self._validation.due(number + 1)
        return msgspec.structs.replace(took, validation_loss=self._validate(number)) if due else took

    def _validate(self, number: int) -> float | None:
        """The loss of the validation manifest behind an optimizer step."""
        assert self._validation is not None
        self._enter(
            f"the plan of the validation behind step {number}",
            self.timeouts.of_plan(self._planning_ms),
            "--plan-timeout",
        )
        loss = ValidationLoss()
        with undisturbed(self.model, self._context.device), self._context.optimizer.in_use():
            for planned in self._validation.planned():
                limit = self._limits.of_step(planned)
                self._enter(f"the validation behind step {number}", limit, "--step-timeout")
                self._prepare(planned.module, MEASURES)
                loss.add(self._context, planned, self._received(planned, self._messages(planned)))
        drop_gradients(self._context.parameters)
        self._account.add_validation(number, loss.mean)
        told = "is not finite" if loss.mean is None else f"{loss.mean:.6f}"
        events.emit(report.Note(f"step {number}: validation loss {told}, {counted(loss.clips, 'clip')}"))
        return loss.mean

    def _iterate(
        self, planned: Planned, share: Share, following: Planned | None, save_gradients: Path | None
    ) -> report.StepReport:
        """Carry out one batch, of the optimizer step that it has a share of."""
        self._planned, self.module = planned, planned.module
        self.plans_reused += planned.reused
        self._enter_step(planned)
        self._prepare(self.module, share)
        context = self._context
        given = self._ahead.values if self._ahead is not None and self._ahead.clips is planned.clips else {}
        compares = self._shared.wanted(self.module, planned.clips) if dist.get_world_size() > 1 else {}
        own = replace(self._iteration(planned, given), share=share, compares=compares)
        self._load(planned)
        self._ahead = None if following is None else self._look_ahead(following)
        if following is not None:
            self._load(following)
        exposed, self._waited = self._waited, 0.0
        clock = Clock(context.rank, context.runtime)
        context.runtime.reset_peak_memory()
        limits = self._limits.of_instructions(planned)
        progress = StepProgress(self.module, context.rank, planned.step, planned.clips, clock, limits)
        self._enter_step(planned, progress)
        started = time.perf_counter()
        run = run_iteration(context, own, clock, gradient_saver(save_gradients), self._ahead, progress)
        if run.lacked_keys:
            run = self._again(planned, share, clock, save_gradients, progress)
        self.intervals = clock.intervals()
        elapsed = (time.perf_counter() - started) * 1e3
        self._limits.took(planned, elapsed)
        measured = Measured(self.intervals, elapsed, exposed)
        return self._account.report(context, own, planned, run, measured, asked=self.stop.signum if self.stop else 0)

    def _again(
        self, planned: Planned, share: Share, clock: Clock, save_gradients: Path | None, progress: StepProgress
    ) -> Run:
        """A step whose chosen keys had no room, with all keys. Noise and times of clips are those of the first try."""
        events.emit(report.Note(f"step {planned.step} is done again: more keys were chosen than were planned for"))
        assert self._context.predictors is not None
        self._context.predictors.all_keys = True
        own = replace(self._iteration(planned, {}), share=share)
        return run_iteration(self._context, own, clock, gradient_saver(save_gradients), None, progress)

    def _watch_links(self, number: int) -> None:
        """Where plans follow the links: compare what all ranks noted, and plan anew from the third batch after this
        step on: the two before it are drawn and planned by now."""
        notes = self._context.notes
        if notes is None:
            return
        own = notes.take()
        if not self._links.due(number):
            return
        speeds = measured_speeds(gather_values(own, Notes))
        watch = self._links.after(number, speeds)
        if watch is not self._links:
            self._links = watch
            self._plans.follow((number + 1) * self._each + 2, links=watch.planned)

    def _follow_ranks(self, number: int) -> None:
        """Where ranks have become slow, or are no longer: plan anew, as for links. All ranks have seen the same."""
        slowed = self._account.slowed
        if slowed != self._slowed:
            step = (number + 1) * self._each + 2
            for note in notes_of_slow(self._slowed, slowed, step // self._each):
                events.emit(report.Note(note))
            self._slowed = slowed
            self._plans.follow(step, slowed=slowed)

    def _iteration(self, planned: Planned, given: Mapping[str, OnHost]) -> Iteration:
        """What this rank is to do in a step; worked out once for a plan that comes again."""
        known = self._own.get(planned.key)
        if known is not None and known.module is planned.module and not given:
            return replace(known, step=planned.step, clips=planned.clips)
        messages = self._messages(planned)
        received, rank = self._received(planned, messages), self._context.rank
        own = Iteration.of(planned.module, rank, planned.clips, received, planned.step, given, messages)
        if not given:
            self._own[planned.key] = own
            if len(self._own) > KEPT:
                self._own.pop(next(iter(self._own)))
        return own

    def _messages(self, planned: Planned) -> StageMessages | None:
        """What goes between this rank and other stages; None where the model is one stage."""
        pipeline, sequence = self._context.pipeline, self._context.sequence
        return None if pipeline is None else StageMessages(pipeline, planned.module, planned.clips, sequence)

    def _received(self, planned: Planned, messages: StageMessages | None) -> dict[str, TensorSpec]:
        """The spec of every value this rank receives, by cascade."""
        module, clips, program = planned.module, planned.clips, program_of(planned.module, self._context.rank)
        specs = self._specs.received(module, program, clips)
        if messages is not None:
            names = {step.target for step in program.instructions if step.op == "receive"}
            specs |= {name: messages.spec(name) for name in names - set(specs)}
        return specs

    def _enter_step(self, planned: Planned, progress: StepProgress | None = None) -> None:
        self._enter(f"step {planned.step}", self._limits.of_step(planned), "--step-timeout", progress)

    def _plan(self, number: int) -> Planned | None:
        """The batch and program of step ``number``; the next one's is made meanwhile. None where there is no batch."""
        self._enter(f"the plan of step {number}", self.timeouts.of_plan(self._planning_ms), "--plan-timeout")
        started = time.perf_counter()
        planned = self._plans.get(number)
        self._plans.prepare(number + 1)
        self._waited += (time.perf_counter() - started) * 1e3
        return planned

    def _following(self, number: int) -> Planned | None:
        """A later step, where its plan is there by now; the one after it is made meanwhile."""
        started = time.perf_counter()
        planned = self._plans.get_ready(number)
        if not self._plans.follows_densities:  # else when this step has measured them
            self._plans.prepare(number + 1)
        self._waited += (time.perf_counter() - started) * 1e3
        return planned

    def _look_ahead(self, planned: Planned) -> Ahead:
        """What this rank may encode for a later step."""
        module = planned.module
        limit = module.cluster.memory if module.cluster else 0.0
        return Ahead.of(module, program_of(module, self._context.rank), limit, planned.clips)

    def _load(self, planned: Planned) -> None:
        """Have loaded in the background what this rank encodes in a step."""
        cascades = {cascade.name: cascade for cascade in planned.module.cascades}
        program = program_of(planned.module, self._context.rank)
        self._context.loads.want(planned.step, encoded_here(program, cascades, planned.clips))

    def saves(self, steps: int, due: bool) -> None:
        """Begin a checkpoint after ``steps`` optimizer steps, where ``due``; else see whether the last is written."""
        if self._checkpoints is None:
            return
        self._enter(f"the checkpoint of step {steps}", self.timeouts.of_start(self.module), "--start-timeout")
        if due:
            self._account.sync(steps - 1)
            self._checkpoints.save(self._written(), self._position(steps))
        else:
            self._checkpoints.poll()

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is whole."""
        if self._checkpoints is not None:
            self._enter("the last checkpoint", self.timeouts.of_start(self.module), "--start-timeout")
            self._checkpoints.finish()

    def _position(self, steps: int) -> Position:
        planned = self._planned
        drawn = planned is not None and planned.step // self._each + 1 == steps
        mark = planned.mark if planned is not None and drawn else self._plans.batches.mark(steps * self._each)
        seed, model = self._context.training.seed, self._executable.digests[MODEL]
        own = self._context.optimizer.recipe.name
        return Position(steps, seed, model, mark.clips, mark.data, self._frozen, mark.source, self._each, own)

    def start_gathers(self) -> None:
        """Begin already to gather what ranks have updated in parts, which else the next step does first."""
        self._context.start_gathers(program_of(self.module, self._context.rank).instructions)

    @property
    def model_is_whole(self) -> bool:
        """Whether every parameter lies on this rank between steps."""
        return self._context.cells is None and self._context.pipeline is None

    def finish_gathers(self) -> None:
        """Wait for what this rank has begun to gather. Not collective."""
        for updated in self._context.updated.values():
            updated.finish()

    def close(self) -> None:
        """End the planner and the threads."""
        self._plans.close()
        if self._validation is not None:
            self._validation.close()
        if self._checkpoints is not None:
            self._checkpoints.close()
        self._context.threads.close()
        if self._context.notes is not None:
            self._context.notes.close()

    def close_groups(self) -> None:
        """Give up the process groups and the connections of the steps. Collective; after a failure nobody may call it,
        and they end with the default group."""
        dist.barrier()  # nobody closes what another still waits on
        self._context.disconnect()

    def _prepare(self, module: Module, share: Share) -> None:
        """Make what this program needs and earlier ones did not: process groups, connections, traced blocks."""
        context = self._context
        if share.begins:
            drop_gradients(context.parameters)
            keep_gradients(context.parameters, module)
        context.reserve_host_memory(module)
        if module is self._ready:
            return
        self._ready = module
        context.connect(module)
        self.clock.done("connections")
        self._context = replace(context, sequence=self._sequences.for_program(module))
        self.clock.done("blocks")

    def _state(self) -> State:
        """Everything that the next step depends on, as tensors, and parts of tensors."""
        buffers: State = {f"buffer/{name}": value for name, value in self._context.model.named_buffers()}
        state, cells, pipeline = self._context.optimizer.tensors(), self._context.cells, self._context.pipeline
        state = state if cells is None else cells.parts(state)
        predictors = self._context.predictors
        learned = {} if predictors is None else predictors.tensors()
        return {**(state if pipeline is None else pipeline.written(state)), **buffers, **learned}

    def _written(self) -> State:
        """What a checkpoint holds: the state, what the optimizer remembers in its groups, and weights to export where
        they are others than those that train."""
        optimizer = self._context.optimizer
        in_use = {f"{IN_USE}/{name}": value.view(-1) for name, value in optimizer.weights_in_use().items()}
        entries = optimizer.entries().encode()
        if not entries:
            return {**self._state(), **in_use}
        # of another length where a float prints otherwise
        text = torch.frombuffer(bytearray(entries), dtype=torch.uint8)
        return {**self._state(), **in_use, ENTRIES: Part(text, 0, len(text), writes=dist.get_rank() == 0)}

    def _resume(self, whole: checkpoint.Whole | None) -> None:
        """Go on from a checkpoint, where there is one."""
        self._left: tuple[str | None, ...] = ()
        if whole is not None:
            stored = checkpoint.tensors_of(whole)
            state = {n: x for n, x in self._state().items() if n in stored or not n.startswith(HISTORY)}
            entries = torch.zeros(stored[ENTRIES].size if ENTRIES in stored else 0, dtype=torch.uint8)
            if len(entries):
                state[ENTRIES] = entries
            self._left = note_of_left(stored, state), kinds_left(stored, state)
            checkpoint.restore(whole, state, self._position(whole.position.steps))
            self._context.optimizer.round_parameters()
            self._context.optimizer.done = whole.position.steps
            if len(entries):
                self._context.optimizer.take_entries(bytes(entries.numpy()).decode())
            if self._context.predictors is not None:
                self._context.predictors.loaded(state, str(whole.path))
