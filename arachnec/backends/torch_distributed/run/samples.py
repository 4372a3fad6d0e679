"""Samples of the model in training, on the ranks of a run.

A rank that holds the whole model samples its own requests alone. In a cell every forward gathers the layers, so its
members take as many forwards as the one that needs most: where a member has none left, it gathers all the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from arachnec.backends.torch_distributed.executor.iteration import program_of
from arachnec.backends.torch_distributed.rank.rank_context import RankContext
from arachnec.backends.torch_distributed.reporting import events, report
from arachnec.backends.torch_distributed.run.validation import undisturbed
from arachnec.executable.training_options import Training, bad_value
from arachnec.ir.diagnostic import UserError, counted
from arachnec.ir.nodes import Module
from arachnec.model_state.cells.gathering import Gathering
from arachnec.runtime.agreement import agree, gather, gather_text
from arachnec.sampling.during_training import STAGES, UNCUT, TrainingSamples


@dataclass
class Samples:
    """All methods are collective but ``due``. ``forwards`` are those of the member of this rank's cell that needs
    most."""

    own: TrainingSamples
    context: RankContext
    folder: Path
    forwards: int

    @classmethod
    def of(cls, training: Training, context: RankContext, folder: Path) -> Samples | None:
        """None where nothing is asked for. Raises ``UserError``."""
        options, device = training.sampling, context.device
        if options.file is not None and context.pipeline is not None:
            raise UserError(bad_value("sampling.file", options.file, STAGES, UNCUT))
        with undisturbed(context.model, device):
            own = TrainingSamples.of(options, device, context.rank, dist.get_world_size())
        if own is None:
            return None
        agree({"the sampler file and its requests": own.digest})
        counts = [int(count) for count in gather(torch.tensor(own.forwards))]
        return cls(own, context, folder, max(counts[rank] for rank in _together(context)))

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
            if context.cells is None:
                failed = self.own.write(context.model, folder, context.device)
            else:
                failed = self._in_cell([stage.gathering for stage in context.cells.stages.values()], folder)
        told = [
            name for text in gather_text(msgspec.json.encode(failed).decode()) for name in msgspec.json.decode(text)
        ]
        events.emit(report.Note(f"step {number}: {counted(self.own.count - len(told), 'sample')} in {folder}"))
        for name in told:
            events.emit(report.Note(f"step {number}: request {name} has no sample: its latents are no numbers"))

    def _in_cell(self, gatherings: list[Gathering], folder: Path) -> list[str]:
        (gathering,) = gatherings  # of a model that is one stage
        left = self.forwards

        @contextmanager
        def around() -> Iterator[None]:
            nonlocal left
            left -= 1
            with gathering.outside():
                yield

        failed = self.own.write(self.context.model, folder, self.context.device, around)
        with torch.no_grad():
            while left:
                with around():
                    pass
        return failed


def _together(context: RankContext) -> list[int]:
    """The ranks of this one's cell; without cells itself."""
    if context.cells is None:
        return [context.rank]
    (stage,) = context.cells.stages.values()
    return [context.rank] if stage.cell is None else dist.get_process_group_ranks(stage.cell)
