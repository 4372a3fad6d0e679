"""Samples of a model in training: latents behind an optimizer step, written by all ranks together."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from arachnec.backends.torch_distributed import events, report
from arachnec.backends.torch_distributed.rank_context import RankContext
from arachnec.backends.torch_distributed.validation import undisturbed
from arachnec.executable.training_options import Training
from arachnec.ir.diagnostic import counted
from arachnec.runtime.agreement import agree, gather_text
from arachnec.sampling.during_training import TrainingSamples


def samples_of(context: RankContext, training: Training, device: torch.device) -> TrainingSamples | None:
    """What is sampled beside training; None where nothing is. Collective. Raises ``UserError``."""
    whole = context.cells is None and context.pipeline is None
    with undisturbed(context.model, device):
        samples = TrainingSamples.of(training.sampling, device, context.rank, dist.get_world_size(), whole=whole)
    if samples is not None:
        agree({"the sampler file and its requests": samples.digest})
    return samples


def write_samples(context: RankContext, samples: TrainingSamples, folder: Path, number: int) -> None:
    """Latents of the model behind optimizer step ``number``, in ``folder``."""
    for updated in context.updated.values():
        updated.wait_outside()
    with undisturbed(context.model, context.device):
        failed = samples.write(context.model, folder, context.device)
    told = [name for text in gather_text(msgspec.json.encode(failed).decode()) for name in msgspec.json.decode(text)]
    events.emit(report.Note(f"step {number}: {counted(samples.count - len(told), 'sample')} in {folder}"))
    for name in told:
        events.emit(report.Note(f"step {number}: request {name} has no sample: its latents are no numbers"))
