"""The encoders of one rank: its share of the clips, what is encoded for the next step, the form of what it receives.

A clip that cannot be read has a value that is no number (``set_aside``).

An encoder is frozen and reads a clip, nothing else: what it makes does not depend on the step in which it runs. So a
rank that has nothing to do but wait may encode what its next program begins with, as far as memory goes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from arachnec.analysis.receive_prefetch import planned_memory
from arachnec.analysis.uses import Values
from arachnec.backends.cascade_step import encode, encode_loaded
from arachnec.backends.torch_distributed.batches.load_ahead import own_clips
from arachnec.backends.torch_distributed.batches.set_aside import no_numbers, stand_in
from arachnec.backends.torch_distributed.executor.iteration import Iteration
from arachnec.backends.torch_distributed.rank.rank_context import RankContext
from arachnec.cost.compute import is_divided
from arachnec.data.clip import VideoClip
from arachnec.ir.nodes import Cascade, Module, Phase, Program, Stage
from arachnec.kernels.attention.exchange import gather_tokens
from arachnec.kernels.attention.sequence_shard import even_split
from arachnec.models.clip_errors import naming
from arachnec.models.file import ModelFile
from arachnec.runtime.device_runtime import HostCopy, OnHost
from arachnec.runtime.handoffs import TensorSpec
from arachnec.spmd.spatial.peers import Group
from arachnec.tracing.errors import needs_values


@dataclass(frozen=True)
class Encoding:
    """``stages`` are the module's, by name."""

    context: RankContext
    iteration: Iteration
    stages: Mapping[str, Stage]

    def run(self, cascade: Cascade, ranks: tuple[int, ...]) -> HostCopy:
        """The values of all clips of a cascade, on each of its ranks. Collective where there are several."""
        clips = self._clips(cascade)
        if is_divided(cascade, self.stages[cascade.stage], len(ranks)):
            return self.context.runtime.to_host(self._together(cascade, clips, ranks))
        own = own_clips(range(len(clips)), ranks, self.context.rank)
        encoded = self._one_by_one(cascade.stage, [clips[number] for number in own], self.iteration.step)
        if len(own) < len(clips):
            rows = self.context.groups.shard(ranks, even_split(len(clips), len(ranks)), 1, len(ranks))
            encoded = gather_tokens(encoded, 0, rows)
        return self.context.runtime.to_host(encoded)

    def alone(self, cascade: Cascade, clips: Sequence[VideoClip], step: int) -> HostCopy:
        """The values of a cascade of another step, by this rank."""
        return self.context.runtime.to_host(self._one_by_one(cascade.stage, clips, step))

    def _one_by_one(self, stage: str, clips: Sequence[VideoClip], step: int) -> Tensor:
        """No number for a clip that cannot be read."""
        encoder, rows = self.context.encoders[stage], []
        for clip in clips:
            with naming([clip], stage):
                loaded = self.context.loads.take_readable(step, stage, clip)
                if loaded is None:
                    rows.append(stand_in(encoder, clip, self.context.device))
                else:
                    rows.append(encode_loaded(encoder, [loaded]))
        return torch.cat(rows)

    def _together(self, cascade: Cascade, clips: Sequence[VideoClip], ranks: tuple[int, ...]) -> Tensor:
        """One clip after the other, each by all of the ranks: also one that cannot be read, because others wait."""
        context, stage, rows = self.context, cascade.stage, []
        peers = Group(ranks, ranks.index(context.rank), context.groups.get(ranks))
        encoder = context.encoders[stage]
        for clip in clips:
            with naming([clip], stage):
                loaded = context.loads.take_readable(self.iteration.step, stage, clip)
                given = no_numbers(encoder, clip, context.device) if loaded is None else loaded
                row = context.divided.encode(context.model_file, stage, encoder, given, peers)
            rows.append(torch.full_like(row, torch.nan) if loaded is None else row)
        return torch.cat(rows)

    def _clips(self, cascade: Cascade) -> list[VideoClip]:
        return [self.iteration.clips[clip] for clip in cascade.clips]


BEFORE = ("gather", "encode", "send", "receive", "free")  # what a program begins with while no model has run


@dataclass
class Ahead:
    """What may be encoded ahead for one program, and what has been."""

    module: Module
    todo: list[Cascade]
    clips: Mapping[int, VideoClip] = field(default_factory=dict)  # of that program's step
    values: dict[str, OnHost] = field(default_factory=dict)

    @classmethod
    def of(cls, module: Module, program: Program, limit: float, clips: Mapping[int, VideoClip] | None = None) -> Ahead:
        """The longest beginning of the program's encoders whose values fit ``limit`` GiB together from the start on."""
        values = Values(module)
        todo: list[Cascade] = []
        for name in encoders_first(program):
            names = {chosen.name for chosen in todo} | {name}
            cascade = values.cascades[name]
            if cascade.inputs or max(planned_memory(values, program, names)) > limit:
                break
            todo.append(cascade)
        return cls(module, todo, clips or {})

    def run(self, encode: Callable[[Cascade], OnHost], waiting: Callable[[], bool]) -> None:
        """Encode one after the other for as long as there is something to wait for."""
        while self.todo and waiting():
            cascade = self.todo.pop(0)
            self.values[cascade.name] = encode(cascade)


def encoders_first(program: Program) -> list[str]:
    """The cascades that a rank encodes by itself before it does anything else."""
    names: list[str] = []
    for instruction in program.instructions:
        if instruction.op not in BEFORE or (instruction.op == "encode" and len(instruction.peers) > 1):
            break
        if instruction.op == "encode":
            names.append(instruction.target)
    return names


@dataclass
class Specs:
    """Runs an encoder on the meta device, once per encoder and clip shape."""

    model_file: ModelFile
    encoders: Mapping[str, nn.Module]
    device: torch.device
    _meta: dict[str, nn.Module] = field(default_factory=dict)
    _known: dict[tuple[object, ...], TensorSpec] = field(default_factory=dict)

    def received(self, module: Module, program: Program, clips: Mapping[int, VideoClip]) -> dict[str, TensorSpec]:
        """The spec of every encoder's value this rank receives, by cascade."""
        names = {step.target for step in program.instructions if step.op == "receive"}
        return {
            cascade.name: self._of(cascade.stage, [clips[clip] for clip in cascade.clips])
            for cascade in module.cascades
            if cascade.name in names and cascade.phase is Phase.ENCODE
        }

    def _of(self, stage: str, clips: Sequence[VideoClip]) -> TensorSpec:
        rows = [self._of_clip(stage, clip) for clip in clips]
        return TensorSpec((sum(row.shape[0] for row in rows), *rows[0].shape[1:]), rows[0].dtype)

    def _of_clip(self, stage: str, clip: VideoClip) -> TensorSpec:
        # The file's own size does not matter: `load` scales to the clip's.
        key = (stage, *clip.shape)
        if key not in self._known:
            value = self._encoded(stage, clip)
            self._known[key] = TensorSpec(tuple(value.shape), value.dtype)
        return self._known[key]

    def _encoded(self, stage: str, clip: VideoClip) -> torch.Tensor:
        meta = torch.device("meta")
        try:
            if not self._meta and self.model_file.encoders is not None:
                with meta:
                    self._meta.update(self.model_file.encoders())
            with meta:
                return encode(self._meta[stage].to(meta).eval(), [clip], meta)
        except Exception as error:
            if not needs_values(error):
                raise
            # An encoder whose forward looks at values has no meta form: here its own output says its shape.
            return encode(self.encoders[stage], [clip], self.device)
