"""Samples of the model in training, on the ranks of a run; of a model in stages, one rank of each takes part.

A rank that holds the whole model samples its own requests alone. In a cell every forward gathers the layers, so its
members take as many forwards as the one that needs most: where a member has none left, it gathers all the same. Where
the model is in stages, one rank of each makes a chain, and a chain samples its requests. Its ranks draw the same noise
and take the same steps of the same request. In a forward each runs its stages and sends on what they hand on; the rank
of the last stage has the prediction, and gives it to the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arachnec.backends.stage_step import forms_between, pack, packed_size, unpack
from arachnec.backends.torch_distributed.executor.iteration import program_of
from arachnec.backends.torch_distributed.rank.pipeline_rank import PipelineRank
from arachnec.backends.torch_distributed.rank.rank_context import RankContext
from arachnec.backends.torch_distributed.reporting import events, report
from arachnec.backends.torch_distributed.run.validation import undisturbed
from arachnec.executable.training_options import Training
from arachnec.ir.diagnostic import counted
from arachnec.ir.nodes import Module
from arachnec.model_state.cells.gathering import Gathering
from arachnec.runtime.agreement import agree, gather, gather_values
from arachnec.sampling.during_training import TrainingSamples
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


@dataclass
class Samples:
    """All methods are collective but ``due``. ``forwards`` are those of the member of this rank's cell that needs
    most."""

    own: TrainingSamples
    context: RankContext
    folder: Path
    forwards: int
    chain: Chain | None = None  # of this rank, where the model is in stages

    @classmethod
    def of(cls, training: Training, context: RankContext, folder: Path) -> Samples | None:
        """None where nothing is asked for. Raises ``UserError``."""
        options, device = training.sampling, context.device
        chain = None if context.pipeline is None else chain_of(context.rank, context.pipeline.places)
        part: int | None
        if context.pipeline is None:
            part, parts, writes = context.rank, dist.get_world_size(), True
        elif chain is None:
            part, parts, writes = None, 1, False
        else:
            part, parts, writes = chain.number, chain.count, context.rank == chain.ranks[-1]
        with undisturbed(context.model, device):
            own = TrainingSamples.of(options, device, part, parts, writes=writes)
        if own is None:
            return None
        agree({"the sampler file and its requests": own.digest})
        counts = [int(count) for count in gather(torch.tensor(own.forwards))]
        return cls(own, context, folder, max(counts[rank] for rank in _together(context)), chain)

    def due(self, steps: int) -> bool:
        """Whether they are asked for behind so many optimizer steps."""
        return self.own.due(steps)

    def write(self, number: int, module: Module) -> None:
        """Latents of the model behind optimizer step ``number``, the last program of which was ``module``'s."""
        context, folder = self.context, self.folder / f"step-{number + 1}"
        context.start_gathers(program_of(module, context.rank).instructions)
        for updated in context.updated.values():
            updated.wait()
        with undisturbed(context.model, context.device):
            failed = self._sampled(folder)
        told = [name for names in gather_values(failed, list[str]) for name in names]
        events.emit(report.Note(f"step {number}: {counted(self.own.count - len(told), 'sample')} in {folder}"))
        for name in told:
            events.emit(report.Note(f"step {number}: request {name} has no sample: its latents are no numbers"))

    def _sampled(self, folder: Path) -> list[str]:
        """This rank's part of all samples; the names of its requests that failed."""
        context, chain = self.context, self.chain
        gatherings = _gatherings(context)
        left = self.forwards
        staged = None
        if context.pipeline is not None and chain is not None:
            staged = StagedForward(context.pipeline, context.model, chain, gatherings)

        @contextmanager
        def around() -> Iterator[None]:
            nonlocal left
            left -= 1
            with ExitStack() as stack:
                for gathering in gatherings.values() if staged is None else ():  # else each stage gathers its own
                    stack.enter_context(gathering.outside())
                yield

        failed = self.own.write(context.model, folder, context.device, around, staged)
        with torch.no_grad():
            for _ in range(left if gatherings else 0):
                for gathering in gatherings.values():
                    with gathering.outside():
                        pass
        return failed


def _gatherings(context: RankContext) -> dict[str, Gathering]:
    """Of this rank's stages whose layers are dealt out, in the stages' order."""
    if context.cells is None:
        return {}
    names = context.cells.stages if context.pipeline is None else context.pipeline.names
    return {name: context.cells.stages[name].gathering for name in names if name in context.cells.stages}


def _together(context: RankContext) -> set[int]:
    """The ranks of this one's cells; without cells itself."""
    ranks = {context.rank}
    for stage in context.cells.stages.values() if context.cells is not None else ():
        ranks.update(() if stage.cell is None else dist.get_process_group_ranks(stage.cell))
    return ranks
