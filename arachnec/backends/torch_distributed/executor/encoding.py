"""The encoders of one rank's iteration: its share of the clips, or its part of every clip.

A clip that cannot be read has a value that is no number (``set_aside``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from arachnec.backends.cascade_step import encode_loaded
from arachnec.backends.torch_distributed.batches.load_ahead import own_clips
from arachnec.backends.torch_distributed.batches.set_aside import no_numbers, stand_in
from arachnec.backends.torch_distributed.executor.iteration import Iteration
from arachnec.backends.torch_distributed.rank.rank_context import RankContext
from arachnec.cost.compute import is_divided
from arachnec.data.clip import VideoClip
from arachnec.ir.nodes import Cascade, Stage
from arachnec.kernels.attention.exchange import gather_tokens
from arachnec.kernels.attention.sequence_shard import even_split
from arachnec.models.clip_errors import naming
from arachnec.runtime.device_runtime import HostCopy
from arachnec.spmd.spatial.peers import Group


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
