"""A forward of a model in stages that no program has, for a sample: one rank of every stage takes part.

The ranks of a *chain* draw the same noise and take the same steps of the same request. In a forward each runs its
stages and sends on what they hand on; the rank of the last stage has the prediction, and gives it to the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arachnec.backends.stage_step import forms_between, pack, packed_size, unpack
from arachnec.backends.torch_distributed.rank.pipeline_rank import PipelineRank
from arachnec.model_state.cells.gathering import Gathering
from arachnec.tracing.dataflow import Form, Output

TAG = 11  # of messages between hosts
PRECISIONS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DIMS = 16  # of a prediction, at most


@dataclass(frozen=True)
class Chain:
    """Of ``count`` chains the one with ``number``; ``ranks`` has one of every stage."""

    number: int
    count: int
    ranks: tuple[int, ...]


def chain_of(rank: int, places: Sequence[Sequence[int]]) -> Chain | None:
    """The chain of a rank, of as many as the stage with fewest ranks has; None for a rank that is left over."""
    count = min(map(len, places))
    number = next((tuple(place).index(rank) for place in places if rank in place), count)
    return Chain(number, count, tuple(place[number] for place in places)) if number < count else None


@dataclass(frozen=True, eq=False)
class StagedForward:
    """The model's forward on the ranks of a chain, each of which calls it with the same arguments.

    ``gatherings`` are of this rank's stages whose layers are dealt out, by the stage's name.
    """

    pipeline: PipelineRank
    model: nn.Module
    chain: Chain
    gatherings: Mapping[str, Gathering]

    def __call__(self, **arguments: Any) -> Tensor:
        """The prediction. Raises ``UserError`` for arguments with which the model cannot be cut."""
        pipeline, ranks = self.pipeline, self.chain.ranks
        cut = pipeline.cuts.of_arguments(arguments)
        handed: Mapping[Output, Tensor] = {}
        prediction: Tensor | None = None
        for number, rank in enumerate(ranks):
            if rank != pipeline.rank:
                continue
            if number and ranks[number - 1] != rank:
                handed = self._receive(forms_between(cut, number - 1), ranks[number - 1])
            gathering = self.gatherings.get(pipeline.names[number])
            with nullcontext() if gathering is None else gathering.outside():
                run = pipeline.cuts.forward(self.model, cut, number)(arguments, handed)
            handed, prediction = run.outputs, run.prediction
            if number + 1 < len(ranks) and ranks[number + 1] != rank:
                self._send(handed, forms_between(cut, number), ranks[number + 1])
        return self._shared(prediction)

    def _send(self, values: Mapping[Output, Tensor], forms: Mapping[Output, Form], to: int) -> None:
        message = torch.empty(packed_size(forms), dtype=torch.uint8)
        pack(values, forms, message)
        dist.send(message, to, tag=TAG)

    def _receive(self, forms: Mapping[Output, Form], source: int) -> dict[Output, Tensor]:
        message = torch.empty(packed_size(forms), dtype=torch.uint8)
        dist.recv(message, source, tag=TAG)
        device = next(self.model.parameters()).device
        return unpack(message.to(device), forms)

    def _shared(self, prediction: Tensor | None) -> Tensor:
        """The prediction, from the rank of the last stage."""
        own, last = self.pipeline.rank, self.chain.ranks[-1]
        if own == last:
            assert prediction is not None, "the last stage ends in the prediction"
            value = prediction.detach().cpu().contiguous()
            about = [PRECISIONS.index(value.dtype), value.ndim, *value.shape]
            for rank in dict.fromkeys(self.chain.ranks[:-1]):
                if rank != own:
                    dist.send(torch.tensor(about + [0] * (2 + DIMS - len(about))), rank, tag=TAG)
                    dist.send(value, rank, tag=TAG)
            return prediction
        told = torch.empty(2 + DIMS, dtype=torch.int64)
        dist.recv(told, last, tag=TAG)
        precision, dims, *sizes = told.tolist()
        value = torch.empty(sizes[:dims], dtype=PRECISIONS[precision])
        dist.recv(value, last, tag=TAG)
        return value.to(next(self.model.parameters()).device)
