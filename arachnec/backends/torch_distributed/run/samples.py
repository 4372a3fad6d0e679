"""Samples of the model in training, on the ranks of a run.

A rank that holds the whole model samples its own requests alone. In a cell every forward gathers the layers, so its
members take as many forwards as the one that needs most: where a member has none left, it gathers all the same. Where
the model is in stages, one rank of each makes a chain (``staged_samples``), and a chain samples its requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from arachnec.backends.torch_distributed.executor.iteration import program_of
from arachnec.backends.torch_distributed.rank.rank_context import RankContext
from arachnec.backends.torch_distributed.reporting import events, report
from arachnec.backends.torch_distributed.run.staged_samples import Chain, StagedForward, chain_of
from arachnec.backends.torch_distributed.run.validation import undisturbed
from arachnec.executable.training_options import Training
from arachnec.ir.diagnostic import counted
from arachnec.ir.nodes import Module
from arachnec.model_state.cells.gathering import Gathering
from arachnec.runtime.agreement import agree, gather, gather_text
from arachnec.sampling.during_training import TrainingSamples


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
        told = [
            name for text in gather_text(msgspec.json.encode(failed).decode()) for name in msgspec.json.decode(text)
        ]
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
