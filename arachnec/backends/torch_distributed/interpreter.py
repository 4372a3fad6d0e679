"""One rank walks its own program: encode, forward, backward, send, receive, reduce, step, free.

The loss on each of the d ranks of a cascade is weighted by (clips / N) / d, so that every rank's gradients are partial
and one sum over the ranks, at ``reduce``, makes them whole (docs/sequence_parallel.md, "Partial gradients").
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor, nn

from arachnec.analysis.receive_prefetch import prefetch_receives
from arachnec.analysis.uses import Values, overlapped_reduces
from arachnec.backends.cascade_step import cascade_loss, drop_gradients, encode
from arachnec.backends.reference import encoded_inputs
from arachnec.backends.torch_distributed.clock import Clock
from arachnec.backends.torch_distributed.encode_ahead import Ahead
from arachnec.backends.torch_distributed.gradients import GradientSums, layers_in
from arachnec.backends.torch_distributed.handoffs import Handoffs, TensorSpec
from arachnec.backends.torch_distributed.optimizer import Optimizer
from arachnec.backends.torch_distributed.supported import demand_supported
from arachnec.data.clip import VideoClip
from arachnec.executable.training_options import Training
from arachnec.ir.nodes import Cascade, Instruction, Module, Program, integer, integers
from arachnec.kernels.attention.exchange import gather_tokens
from arachnec.kernels.attention.process_groups import ProcessGroups
from arachnec.kernels.attention.sequence_shard import SequenceShard, even_split
from arachnec.models.file import ModelFile


class SequenceParallel(Protocol):
    """A model whose blocks can run on a shard of the tokens: ``arachnec.spmd.sharded_model.SequenceModel``."""

    def use(self, shard: SequenceShard | None, recompute: bool) -> AbstractContextManager[object]: ...


@dataclass(frozen=True)
class Equipment:
    """What a rank keeps from step to step."""

    rank: int
    device: torch.device
    model_file: ModelFile
    model: nn.Module
    parameters: Mapping[str, Tensor]  # those that train, under the module's own names
    encoders: Mapping[str, nn.Module]
    sequence: SequenceParallel | None  # None: only degree 1 without recomputation
    optimizer: Optimizer
    groups: ProcessGroups
    sum_groups: ProcessGroups  # of gradient sums alone: they run beside the collectives of cascades
    channels: Mapping[tuple[int, int], torch.distributed.ProcessGroup]
    training: Training


@dataclass(frozen=True)
class Iteration:
    """What a rank is to do in one step."""

    module: Module
    program: Program
    clips: Mapping[int, VideoClip]
    specs: Mapping[str, TensorSpec]  # of every value received, by cascade
    step: int
    posts: tuple[tuple[Instruction, ...], ...]
    given: Mapping[str, Tensor]  # what was encoded in an earlier step, by cascade

    @classmethod
    def of(
        cls,
        module: Module,
        rank: int,
        clips: Mapping[int, VideoClip],
        specs: Mapping[str, TensorSpec],
        step: int,
        given: Mapping[str, Tensor] | None = None,
    ) -> Iteration:
        """Raises ``UserError`` for an instruction that this back end does not know."""
        program = program_of(module, rank)
        demand_supported(module, [program])
        limit = module.cluster.memory if module.cluster else 0.0
        given = given or {}
        return cls(module, program, clips, specs, step, prefetch_receives(Values(module), program, limit, given), given)


@dataclass
class Run:
    """What one rank's step came to."""

    loss: float = 0.0  # this rank's share of the objective
    norm: float | None = None  # of the gradient before clipping
    values: dict[str, Tensor] = field(default_factory=dict)
    losses: dict[str, Tensor] = field(default_factory=dict)


def program_of(module: Module, rank: int) -> Program:
    return next((p for p in module.programs if p.rank == rank), Program(rank, ()))


def run_iteration(
    equipment: Equipment,
    iteration: Iteration,
    clock: Clock,
    before_step: Callable[[Mapping[str, Tensor]], None] | None = None,
    ahead: Ahead | None = None,
) -> Run:
    """Execute one rank's program.

    ``before_step`` sees the parameters with their whole gradients, before clipping; ``ahead`` is what to do of the next
    program while the sums of gradients are on their way.
    """
    drop_gradients(equipment.parameters)
    run = Run()
    handoffs = Handoffs(equipment.rank, equipment.device, equipment.channels)
    sums = GradientSums(equipment.parameters, layers_in(iteration.module, equipment.model), equipment.sum_groups)
    cascades = {cascade.name: cascade for cascade in iteration.module.cascades}
    walk = _Walk(equipment, iteration, handoffs, sums, run, cascades, before_step, ahead)
    for instruction, posts in zip(iteration.program.instructions, iteration.posts, strict=True):
        for post in posts:
            handoffs.post(post.target, iteration.specs[post.target], post.peers[0])
        walk.wait_for_inputs(instruction, clock)
        with clock.measure(instruction.op, instruction.target):
            walk.execute(instruction)
    handoffs.finish()
    run.loss = float(sum(value.detach() for value in walk.shares)) if walk.shares else 0.0
    return run


@dataclass
class _Walk:
    equipment: Equipment
    iteration: Iteration
    handoffs: Handoffs
    sums: GradientSums
    run: Run
    cascades: Mapping[str, Cascade]
    before_step: Callable[[Mapping[str, Tensor]], None] | None
    ahead: Ahead | None
    shares: list[Tensor] = field(default_factory=list)

    def execute(self, instruction: Instruction) -> None:
        getattr(self, f"_{instruction.op}")(instruction)

    def wait_for_inputs(self, instruction: Instruction, clock: Clock) -> None:
        """Wait for what the instruction reads and is still on its way; a time of its own, not the instruction's."""
        if instruction.op == "step":
            if self.ahead is not None:
                self.ahead.run(partial(self._encoded_ahead, clock), self._sums_are_coming)
            with clock.measure("reduce", instruction.target):
                self.sums.wait()
            return
        names = self.cascades[instruction.target].inputs if instruction.op == "forward" else (instruction.target,)
        for name in names:
            if self.handoffs.is_coming(name) and instruction.op != "receive":
                with clock.measure("wait", name):
                    self.run.values[name] = self.handoffs.arrived(name)

    def _encode(self, instruction: Instruction) -> None:
        cascade = self.cascades[instruction.target]
        if cascade.name in self.iteration.given:
            self.run.values[cascade.name] = self.iteration.given[cascade.name]
            return
        encoder, clips, device = self.equipment.encoders[cascade.stage], self._clips(cascade), self.equipment.device
        ranks = instruction.peers
        if not 1 < len(ranks) <= len(clips):
            self.run.values[cascade.name] = encode(encoder, clips, device)
            return
        rows = self.equipment.groups.shard(ranks, even_split(len(clips), len(ranks)), 1, len(ranks))
        own = encode(encoder, clips[rows.offset : rows.offset + rows.local], device)
        self.run.values[cascade.name] = gather_tokens(own, 0, rows)

    def _encoded_ahead(self, clock: Clock, cascade: Cascade) -> Tensor:
        with clock.measure("encode", cascade.name):
            return encode(self.equipment.encoders[cascade.stage], self._clips(cascade), self.equipment.device)

    def _sums_are_coming(self) -> bool:
        if self.equipment.device.type == "cuda":  # the host is ahead of the device, which may not be waiting at all
            torch.cuda.current_stream(self.equipment.device).synchronize()
        return not self.sums.done

    def _forward(self, instruction: Instruction) -> None:
        equipment = self.equipment
        cascade = self.cascades[instruction.target]
        encoded = encoded_inputs(self.iteration.module, cascade, self.run.values)
        with self._sharded(instruction, cascade):
            loss = cascade_loss(
                equipment.model,
                equipment.model_file,
                self._clips(cascade),
                encoded,
                equipment.training,
                self.iteration.step,
                equipment.device,
            )
        degree = max(1, len(instruction.peers))
        share = loss * (len(cascade.clips) / len(self.iteration.module.clips) / degree)
        self.run.losses[cascade.name] = share
        self.shares.append(share.detach())

    def _backward(self, instruction: Instruction) -> None:
        cascade = self.cascades[instruction.target]
        with self._sharded(instruction, cascade), self.sums.inside_backward(self._sums_inside.get(cascade.name, ())):
            self.run.losses.pop(cascade.name).backward()  # type: ignore[no-untyped-call]

    def _send(self, instruction: Instruction) -> None:
        self.handoffs.send(instruction.target, self.run.values[instruction.target], instruction.peers[0])

    def _receive(self, instruction: Instruction) -> None:
        """Posted already, as early as memory allowed; waited for at its first use."""

    def _reduce(self, instruction: Instruction) -> None:
        self.sums.start(instruction)  # `step` waits for it

    def _step(self, instruction: Instruction) -> None:
        if self.before_step is not None:
            self.before_step(self.equipment.parameters)
        self.run.norm = self.equipment.optimizer.step()
        drop_gradients(self.equipment.parameters)

    def _free(self, instruction: Instruction) -> None:
        self.handoffs.sent(instruction.target)
        self.run.values.pop(instruction.target, None)
        self.run.losses.pop(instruction.target, None)

    @cached_property
    def _sums_inside(self) -> dict[str, list[Instruction]]:
        """The sums that start inside the backward of a cascade."""
        steps, found = self.iteration.program.instructions, overlapped_reduces(self.iteration.program)
        return {steps[index].target: [steps[number] for number in numbers] for index, numbers in found.items()}

    def _clips(self, cascade: Cascade) -> list[VideoClip]:
        return [self.iteration.clips[clip] for clip in cascade.clips]

    def _sharded(self, instruction: Instruction, cascade: Cascade) -> AbstractContextManager[object]:
        sequence = self.equipment.sequence
        if sequence is None:
            return nullcontext()
        # Only the forward's instruction states the grid; its backward, which may compute blocks again, shares it.
        forward = self._forward_of(cascade)
        alone = len(instruction.peers) < 2
        shard = None if alone else self.equipment.groups.shard(forward.peers, *grid_of(forward, cascade))
        return sequence.use(shard, forward.attrs.get("recompute") is True)

    def _forward_of(self, cascade: Cascade) -> Instruction:
        steps = self.iteration.program.instructions
        return next(step for step in steps if step.op == "forward" and step.target == cascade.name)


def grid_of(forward: Instruction, cascade: Cascade) -> tuple[tuple[int, ...], int, int]:
    """Tokens per rank, Ulysses degree and ring degree of a forward on several ranks."""
    degree = len(forward.peers)
    ulysses = integer(forward.attrs.get("ulysses", 1 if "ring" in forward.attrs else degree))
    ring = integer(forward.attrs.get("ring", degree // ulysses))
    shards = integers(forward.attrs["shards"]) if "shards" in forward.attrs else even_split(cascade.tokens, degree)
    return shards, ulysses, ring


def needs_sequence(module: Module) -> bool:
    """Whether some cascade runs on several ranks or computes its blocks again: what takes traced blocks."""
    forwards = [step for p in module.programs for step in p.instructions if step.op == "forward"]
    return any(len(step.peers) > 1 or step.attrs.get("recompute") is True for step in forwards)
