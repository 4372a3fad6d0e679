"""One rank walks its own program: encode, forward, backward, send, receive, reduce, norm, step, free.

The loss on each of the d ranks of a cascade is weighted by (clips / N) / d, so that every rank's gradients are partial
and one sum over the ranks, at ``reduce``, makes them whole (docs/sequence_parallel.md, "Partial gradients").
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from torch import Tensor

from arachnec.analysis.communicators import grid
from arachnec.analysis.gathers import GIVES_SLOTS_BACK
from arachnec.analysis.uses import READS_GRADIENTS, overlapped_reduces
from arachnec.backends.cascade_step import batch_loss, batch_of, finite_rows
from arachnec.backends.reference import encoded_inputs
from arachnec.backends.torch_distributed.batches.batch_preparation import BatchPreparation, HostBatch
from arachnec.backends.torch_distributed.batches.set_aside import usable
from arachnec.backends.torch_distributed.executor.attention import attention_of, precision_of
from arachnec.backends.torch_distributed.executor.encoding import Ahead, Encoding
from arachnec.backends.torch_distributed.executor.iteration import Iteration, Run
from arachnec.backends.torch_distributed.executor.learning import learn
from arachnec.backends.torch_distributed.executor.shared_clips import digest_of, own_part
from arachnec.backends.torch_distributed.executor.stage_cascades import StageCascades, encoders_of
from arachnec.backends.torch_distributed.executor.stage_messages import StageMessages
from arachnec.backends.torch_distributed.rank.rank_context import RankContext
from arachnec.data.clip import VideoClip
from arachnec.ir.nodes import Cascade, Instruction, Module, Phase, Program, Stage, integers
from arachnec.ir.stage_sizes import recomputed_layers
from arachnec.kernels.attention.fused_attention import sdpa_preferring
from arachnec.kernels.attention.sequence_shard import even_split
from arachnec.model_state.cells.gradients import ShardGradients, StageCells
from arachnec.model_state.gradients import GradientSynchronisation, layers_in, piece_size
from arachnec.model_state.kept_gradients import drop_gradients
from arachnec.model_state.optimizer import global_norm, norm_over
from arachnec.models.clip_errors import naming
from arachnec.runtime.device_runtime import Event, HostCopy
from arachnec.runtime.handoffs import Handoffs, Received
from arachnec.runtime.out_of_memory import raise_explained
from arachnec.runtime.rank_resources import spare_cores
from arachnec.runtime.step_progress import Clock, StepProgress
from arachnec.spmd.sparse_layers import SparseCascade

POLL_S = 2e-4


def run_iteration(
    context: RankContext,
    iteration: Iteration,
    clock: Clock,
    before_step: Callable[[Mapping[str, Tensor]], None] | None = None,
    ahead: Ahead | None = None,
    progress: StepProgress | None = None,
) -> Run:
    """Execute one rank's program.

    ``before_step`` sees the whole gradients by name, before clipping, and is given on all ranks or none; ``ahead`` is
    what to do of the next program while gradients are on their way; ``progress`` is told of every instruction.
    """
    share = iteration.share
    if share.begins:
        drop_gradients(context.parameters)
    run = Run()
    cascades = {cascade.name: own_part(cascade, context.rank) for cascade in iteration.module.cascades}
    tags = {name: number for number, name in enumerate(cascades)}
    handoffs = Handoffs(context.connections, context.threads.handoffs, tags, context.notes)
    gradients = _gradients(context, iteration.module, iteration.program, goes_on=not share.begins)
    walk = _Walk(context, iteration, handoffs, gradients, run, cascades, before_step, ahead, progress)
    where = f"step {iteration.step}"
    with walk.attention:
        _walk_program(walk, handoffs, clock, progress, where)
    if progress is not None:
        progress.at(len(iteration.program.instructions))
    walk.end_step()
    handoffs.finish()
    run.loss = float(sum(run.shares.values())) if run.shares else 0.0
    return run


def _walk_program(walk: _Walk, handoffs: Handoffs, clock: Clock, progress: StepProgress | None, where: str) -> None:
    context, iteration, values = walk.context, walk.iteration, walk.run.values
    steps = zip(iteration.program.instructions, iteration.prefetched, strict=True)
    index = -1
    try:
        for index, (instruction, receives) in enumerate(steps):
            if progress is not None:
                progress.at(index)
            for receive in receives:
                spec = iteration.specs[receive.target]
                values[receive.target] = handoffs.prefetch(receive.target, spec, receive.peers[0])
            walk.batches.start(values)
            walk.wait_for_inputs(instruction, clock)
            started = clock.now()
            walk.execute(instruction)
            if context.host_copies is not None:
                context.host_copies.settle()
            clock.note(instruction.op, instruction.target, started)
    except Exception as error:
        raise_explained(error, context.runtime, iteration.module, iteration.program, index, where)
        raise


def _gradients(
    context: RankContext, module: Module, program: Program, *, goes_on: bool
) -> GradientSynchronisation | ShardGradients:
    size = piece_size(module.cluster, tuple(range(len(module.programs))))
    layers = layers_in(module, context.model) if context.pipeline is None else {}
    synchronisation = GradientSynchronisation(
        context.parameters if context.cells is None else context.cells.whole,
        layers,
        context.gradient_groups,
        size,
        context.host_groups,
        context.optimizer.sharded,
    )
    if (pipeline := context.pipeline) is not None:
        reduces = [step.target for step in program.instructions if step.op == "reduce" and "tied" not in step.attrs]
        place = pipeline.place if synchronisation.sharded else None
        of_stages = pipeline.of_stages(reduces)
        synchronisation = replace(synchronisation, of_stages=of_stages, tied=pipeline.tied, place=place)
    if context.cells is None:
        return synchronisation
    return context.cells.gradients(context.gradient_groups, synchronisation, size, goes_on=goes_on)


def _host_batch(context: RankContext, iteration: Iteration, run: Run, cascade: Cascade) -> HostBatch:
    """What a forward reads; it may be asked for in a thread."""
    here = {name: run.values[name].wait() for name in cascade.inputs}
    encoded, kept = usable(encoded_inputs(iteration.module, cascade, here), len(cascade.clips))
    clips = [iteration.clips[clip] for clip in cascade.clips]
    batch = batch_of(context.model_file, clips, encoded, context.training, iteration.step)
    if cascade.clips in iteration.compares:
        run.digests[cascade.clips] = digest_of(encoded, batch)
    return HostBatch(*batch, kept)


@dataclass
class _Walk:
    context: RankContext
    iteration: Iteration
    handoffs: Handoffs
    gradients: GradientSynchronisation | ShardGradients
    run: Run
    cascades: Mapping[str, Cascade]
    before_step: Callable[[Mapping[str, Tensor]], None] | None
    ahead: Ahead | None
    progress: StepProgress | None
    kept: dict[str, list[int]] = field(default_factory=dict)  # of a cascade's clips, those that can be used
    corrected: bool = False
    arrived: set[str] = field(default_factory=set)
    stepped: bool = False
    settled: bool = False  # what was updated before is here
    attention: ExitStack = field(default_factory=ExitStack)
    preferred: str | None = None  # the family that attention takes now
    families: dict[str, str | None] = field(default_factory=dict)  # of attention, by cascade

    def execute(self, instruction: Instruction) -> None:
        if instruction.op in GIVES_SLOTS_BACK and self.context.cells is not None:
            self.context.cells.slots.drop()
        getattr(self, f"_{instruction.op}")(instruction)

    def wait_for_inputs(self, instruction: Instruction, clock: Clock) -> None:
        """Wait for what the instruction reads and is still on its way; a time of its own, not the instruction's."""
        if instruction.op in READS_GRADIENTS and not self.stepped:
            self._prefer(None)
            self.run.left_out.tell()
            if self.iteration.share.ends:
                if self.ahead is not None:
                    self.ahead.run(partial(self._encoded_ahead, clock), self._only_waits)
                with clock.measure("reduce", instruction.target):
                    self.gradients.wait()
                self._correct_weights()
            if self.iteration.share.begins and not self.settled:
                self.settled = True
                for updated in self.context.updated.values():
                    updated.wait()  # a rank without a forward has waited for none
            return
        if instruction.op in ("forward", "backward"):
            for name in self.cascades[instruction.target].inputs:
                value = self.run.values.get(name)  # none of what the stage itself has saved
                if isinstance(value, Received) and name not in self.arrived:
                    self.arrived.add(name)
                    self.batches.waiting(self.run.values)
                    with clock.measure("wait", name):
                        value.wait()

    def _encode(self, instruction: Instruction) -> None:
        self._prefer(None)
        cascade = self.cascades[instruction.target]
        given = self.iteration.given.get(cascade.name)
        self.run.values[cascade.name] = self._encoding.run(cascade, instruction.peers) if given is None else given

    @cached_property
    def _encoding(self) -> Encoding:
        return Encoding(self.context, self.iteration, self._stages)

    def _encoded_ahead(self, clock: Clock, cascade: Cascade) -> HostCopy:
        assert self.ahead is not None
        clips = [self.ahead.clips[clip] for clip in cascade.clips]
        step, progress = self.iteration.step + 1, self.progress
        ahead = nullcontext() if progress is None else progress.encoding_ahead(cascade, clips, step)
        with ahead, clock.measure("encode", cascade.name):
            return self._encoding.alone(cascade, clips, step)

    @cached_property
    def _backwards_done(self) -> Event:
        return self.context.runtime.record()

    def _only_waits(self) -> bool:
        """Whether the device has nothing to do but to wait for gradients of other ranks."""
        while not self._backwards_done.query():  # the host is ahead of its device, and has nothing else to do
            time.sleep(POLL_S)
        return not self.gradients.done

    @cached_property
    def batches(self) -> BatchPreparation:
        named = [self.cascades[step.target] for step in self.iteration.program.instructions if step.op == "forward"]
        # what another stage hands on is no part of a batch
        forwards = [replace(cascade, inputs=tuple(encoders_of(cascade, self.cascades))) for cascade in named]
        runtime, threads = self.context.runtime, self.context.threads
        alone = runtime.capabilities.host_memory and not spare_cores()
        make = partial(_host_batch, self.context, self.iteration, self.run)
        return BatchPreparation(None if alone else threads.batches, make, runtime.to_device, forwards)

    def _forward(self, instruction: Instruction) -> None:
        self._run_forward(instruction)
        if self.batches.done:  # all that this rank will leave out is known, and told while its backwards run
            self.run.left_out.tell()

    def _run_forward(self, instruction: Instruction) -> None:
        cascade = self.cascades[instruction.target]
        batch, kept = self.batches.take(cascade.name, self.run.values)
        (kwargs, target), self.kept[cascade.name] = batch.ready(), kept
        count, degree = len(cascade.clips), max(1, len(instruction.peers))
        share = self.iteration.share.part * len(kept) / len(self.iteration.module.clips) / degree
        if cascade.stage in self.context.updated:
            self.context.updated[cascade.stage].wait_outside()
        if cascade.phase is Phase.FORWARD:
            self._forward_stage(instruction, cascade, kwargs, target, share)
            return
        self._leave_out(cascade, degree)
        clips = naming(self._clips(cascade))
        with clips, self._sharded(instruction, cascade), self._gathered(instruction, cascade):
            seen = partial(self._predicted, cascade, target)
            whole = None if len(kept) == count else kept
            objective = batch_loss(self.context.model, self.context.model_file, kwargs, target, seen, whole, share)
        if (sparse := self._sparse(cascade)) is not None:
            objective = sparse.of_objective(objective)
        self.run.losses[cascade.name] = objective
        self.run.shares[cascade.name] = objective.detach()

    def _leave_out(self, cascade: Cascade, degree: int) -> None:
        """Note the clips of a cascade that take no part. Each of its ranks has an equal share of them."""
        kept = self.kept[cascade.name]
        names = [clip.id for number, clip in enumerate(self._clips(cascade)) if number not in kept]
        self.run.left_out.clips += names
        self.run.left_out.share += len(names) / degree

    def _correct_weights(self) -> None:
        """The mean is that of the clips that took part."""
        if self.corrected:
            return
        self.corrected = True
        share = self.iteration.share
        factor = self.run.left_out.factor(share.clips or len(self.iteration.module.clips), share.left_out)
        if factor != 1.0:
            self.context.optimizer.scale_gradients(self.gradients.parts, factor)

    def _predicted(self, cascade: Cascade, target: Tensor, prediction: Tensor) -> None:
        clips = len(cascade.clips)
        if clips > 1 and (rows := finite_rows(prediction, target, clips)) is not None:
            self.run.rows[cascade.name] = rows

    def _forward_stage(
        self, instruction: Instruction, cascade: Cascade, kwargs: Mapping[str, Any], target: Tensor, share: float
    ) -> None:
        context = self.context
        message = self._message(self.staged.messages.before(cascade))
        whole = None if len(self.kept[cascade.name]) == len(cascade.clips) else self.kept[cascade.name]
        clips = naming(self._clips(cascade))
        with clips, self._sharded(instruction, cascade), self._gathered(instruction, cascade):
            objective, handed_on = self.staged.forward(
                cascade, context.model, context.model_file, kwargs, target, message, share, whole
            )
        if objective is not None:
            self._leave_out(cascade, max(1, len(instruction.peers)))
            self.run.shares[cascade.name] = objective.detach()
        if handed_on is not None:
            self.run.values[cascade.name] = context.runtime.to_host(handed_on)

    def _message(self, name: str | None) -> Tensor | None:
        """What another stage handed on, on the device."""
        if name is None:
            return None
        message: Tensor = self.context.runtime.to_device(self.run.values[name].wait()).ready()
        return message

    @cached_property
    def staged(self) -> StageCascades:
        context, own = self.context, self.iteration
        assert context.pipeline is not None
        messages = own.messages or StageMessages(context.pipeline, own.module, own.clips, context.sequence)
        return StageCascades(messages, context.sequence)

    def _weight(self, instruction: Instruction) -> None:
        cascade = self.cascades[instruction.target]
        reduces = self._reduces_starting(cascade)
        self.staged.weight(instruction, cascade, self._cells(cascade), self.gradients, reduces)

    def _backward(self, instruction: Instruction) -> None:
        cascade = self.cascades[instruction.target]
        if self._needs_no_backward(cascade):
            self.run.losses.pop(cascade.name)
            return
        if cascade.phase is Phase.BACKWARD:
            inside = self._starting_reduces(cascade)
            with self._sharded(instruction, cascade), inside, self._gathered(instruction, cascade):
                message = self._message(self.staged.messages.before(cascade))
                handed_on = self.staged.backward(cascade, message, self.context.groups.get(instruction.peers))
            if handed_on is not None:
                self.run.values[cascade.name] = self.context.runtime.to_host(handed_on)
            return
        with (
            self._sharded(instruction, cascade),
            self._starting_reduces(cascade),
            self._gathered(instruction, cascade),
        ):
            self.run.losses.pop(cascade.name).backward()  # type: ignore[no-untyped-call]

    def _needs_no_backward(self, cascade: Cascade) -> bool:
        """Whether only the loss is wanted, and nothing but gradients waits for the backward: a layer that was gathered
        or lies in host memory, and a stage that hands on, need it to run."""
        whole = self.context.cells is None and self.context.host_copies is None
        return self.iteration.share.measures and whole and cascade.phase is not Phase.BACKWARD

    def _starting_reduces(self, cascade: Cascade) -> AbstractContextManager[None]:
        """Run a backward inside: its all-reduces start as it goes."""
        reduces = self._reduces_starting(cascade)
        return self.gradients.inside_backward(reduces) if reduces else nullcontext()

    def _reduces_starting(self, cascade: Cascade) -> list[Instruction]:
        """The all-reduces that start inside its backward, or weight; none does before an update's last iteration."""
        return self._reduces_inside.get(cascade.name, []) if self.iteration.share.ends else []

    def _cells(self, cascade: Cascade) -> StageCells | None:
        """How the cascade's stage is dealt out; None where it is whole."""
        return None if self.context.cells is None else self.context.cells.stages.get(cascade.stage)

    def _gathered(self, instruction: Instruction, cascade: Cascade) -> AbstractContextManager[None]:
        """Run a forward or backward inside: its layers come and go."""
        cells = self._cells(cascade)
        if cells is None:
            return nullcontext()
        if instruction.op == "forward":
            return cells.gathering.forward(instruction)
        forward = self.staged.forward_of(cascade) if cascade.phase is Phase.BACKWARD else cascade.name
        return cells.gathering.backward(instruction, forward)

    def _send(self, instruction: Instruction) -> None:
        name, to = instruction.target, instruction.peers[0]
        part = None if self.context.pipeline is None else self.staged.messages.sent_to(name, to)
        self.handoffs.send(name, self.run.values[name], to, part)

    def _receive(self, instruction: Instruction) -> None:
        """Prefetched, as early as memory allowed; waited for where its batch is made."""

    def _gather(self, instruction: Instruction) -> None:
        """A layer's forward waits for it. Behind an iteration without an update there is nothing new."""
        if self.iteration.share.begins:
            self.context.start_gathers([instruction])

    def _reduce(self, instruction: Instruction) -> None:
        if self.iteration.share.ends:
            self.gradients.start(instruction)  # `step` waits for it

    def _norm(self, instruction: Instruction) -> None:
        """Of the gradients of all these ranks, of which this one has a share."""
        if not self.iteration.share.ends:
            return
        own, pipeline = self.context.optimizer.gradients(self.gradients.parts or None), self.context.pipeline
        if pipeline is not None:
            own = {name: gradient for name, gradient in own.items() if pipeline.counts(name)}
        group = self.context.norm_group(instruction.peers)
        self.run.norm = norm_over(group, global_norm(own, self.context.device).to(self.context.device))

    def _step(self, instruction: Instruction) -> None:
        """The update of all stages on this rank, at the first ``step``: their gradients are whole by then."""
        if self.stepped or not self.iteration.share.ends:
            return
        self.stepped = True
        self._show_gradients()
        self.run.norm = self.context.optimizer.step(self.gradients.parts or None, self.run.norm)
        for updated in self.context.updated.values():
            updated.outdate()
        self.gradients.drop()

    def _learn(self, instruction: Instruction) -> None:
        self.run.lacked_keys = learn(self.context, self.iteration.step, self.iteration.share, self.run.norm)

    def end_step(self) -> None:
        """A rank whose stages are frozen has no step, and may be the one that is to show all gradients."""
        if not self.iteration.share.ends:
            return
        self._correct_weights()
        if not self.stepped:
            self._show_gradients()

    def _show_gradients(self) -> None:
        """Give whole gradients to who wants to see them, put together on the hosts."""
        if self.before_step is not None:
            own, pipeline = self.gradients.complete(), self.context.pipeline
            self.before_step(own if pipeline is None else pipeline.whole_gradients(own))

    def _free(self, instruction: Instruction) -> None:
        if self.context.runtime.capabilities.host_memory:  # the plan counts a value until here, and then no more
            self.handoffs.let_go(instruction.target)
        self.run.values.pop(instruction.target, None)
        self.run.losses.pop(instruction.target, None)

    @cached_property
    def _reduces_inside(self) -> dict[str, list[Instruction]]:
        """The all-reduces that start inside the backward, or weight, of a cascade."""
        steps, overlapped = self.iteration.program.instructions, overlapped_reduces(self.iteration.program)
        return {steps[index].target: [steps[number] for number in numbers] for index, numbers in overlapped.items()}

    def _clips(self, cascade: Cascade) -> list[VideoClip]:
        return [self.iteration.clips[clip] for clip in cascade.clips]

    def _sharded(self, instruction: Instruction, cascade: Cascade) -> AbstractContextManager[object]:
        """Run a forward or backward inside: its attention, and its share of the sequence, are what the program says."""
        # Only the forward's instruction states the grid; its backward, which may compute blocks again, shares it.
        if cascade.phase is Phase.BACKWARD:
            cascade = self.cascades[self.staged.forward_of(cascade)]
        forward, context = self._forwards[cascade.name], self.context
        stage = self._stages[cascade.stage]
        if cascade.name not in self.families:
            self.families[cascade.name] = attention_of(forward, stage, precision_of(context.model), context.device)
        family = self.families[cascade.name]
        self._prefer(family)  # for attention that is not distributed
        if context.sequence is None:
            return nullcontext()
        alone = len(instruction.peers) < 2
        shard = None if alone else context.groups.shard(forward.peers, *grid_of(forward, cascade))
        shard = shard and replace(shard, attention=family)
        recompute = recomputed_layers(forward.attrs.get("recompute"), stage)
        again = self.staged.deferring(cascade.name) if cascade.phase is Phase.FORWARD else None
        away = context.host_inputs if "offload" in forward.attrs else None
        if away is not None and instruction.op == "forward":
            away.begin()
        return context.sequence.use(shard, recompute, again, away, self._sparse(cascade))

    def _prefer(self, family: str | None) -> None:
        """From now on attention takes this family: it is set where it changes, not for every instruction."""
        if family == self.preferred:
            return
        self.attention.close()
        if family is not None:
            self.attention.enter_context(sdpa_preferring(family))
        self.preferred = family

    def _sparse(self, cascade: Cascade) -> SparseCascade | None:
        """Its attention to chosen keys. Its layers learn where it trains, from the clips that can be used."""
        share, predictors, clips = self.iteration.share, self.context.predictors, len(cascade.clips)
        if predictors is None:
            return None
        kept = self.kept[cascade.name]
        weight = share.part * clips / len(self.iteration.module.clips) if kept and not share.measures else None
        return predictors.cascade(
            cascade,
            self.iteration.clips,
            self.context.training.seed,
            self.iteration.step,
            weight,
            kept=kept,
            trains=not share.measures,
        )

    @cached_property
    def _forwards(self) -> dict[str, Instruction]:
        return {step.target: step for step in self.iteration.program.instructions if step.op == "forward"}

    @cached_property
    def _stages(self) -> dict[str, Stage]:
        return {stage.name: stage for stage in self.iteration.module.stages}


def grid_of(forward: Instruction, cascade: Cascade) -> tuple[tuple[int, ...], int, int]:
    """Tokens per rank, Ulysses degree and ring degree of a forward on several ranks."""
    listed = forward.attrs.get("shards")
    shards = even_split(cascade.tokens, len(forward.peers)) if listed is None else integers(listed)
    return shards, *grid(forward)
