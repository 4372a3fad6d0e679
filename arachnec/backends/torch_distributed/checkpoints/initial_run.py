"""What a run begins from: a checkpoint or weights; and the step that its job aims at, however often it is started.

That step stands in ``job.json`` beside the checkpoints, with the launcher's name of the job.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import torch.distributed as dist
from torch import nn

from arachnec.backends.torch_distributed.checkpoints import checkpoint
from arachnec.backends.torch_distributed.options import RunOptions
from arachnec.backends.torch_distributed.rank.rank_context import RankContext
from arachnec.backends.torch_distributed.reporting import events, report
from arachnec.checkpoint.parts import AVERAGE, IN_USE
from arachnec.executable.training_options import Training
from arachnec.ir.diagnostic import user_error
from arachnec.models.initial_weights import ENCODER_FOLDERS, config_differences, encoder_folder, model_folder
from arachnec.models.weight_files import weight_files
from arachnec.runtime.agreement import gather_text


def frozen_fingerprint(init: Path | None, context: RankContext) -> str:
    """Of the weights in ``init``, where some of them stay frozen: a checkpoint holds only what trains. Else empty.

    Collective: rank 0 alone reads.
    """
    model = context.model if context.pipeline is None else context.pipeline.cuts.model
    if init is None or all(parameter.requires_grad for parameter in model.parameters()):
        return ""
    return gather_text(weight_files(model_folder(init)).fingerprint() if dist.get_rank() == 0 else "")[0]


def init_notes(init: Path | None, model: nn.Module, encoders: Mapping[str, nn.Module]) -> list[str]:
    """What a person should know of the weights before the first step."""
    if init is None or dist.get_rank() != 0:
        return []
    notes = []
    if differences := config_differences(init, model):
        notes.append(f"the config.json of {init} says other things than the model's: {'; '.join(differences)}")
    built = [name for name, encoder in encoders.items() if not encoder_folder(init, name, encoder).is_dir()]
    if built:
        folders = ", ".join(f"{ENCODER_FOLDERS.get(name, name)}/" for name in built)
        notes.append(f"{init} has no {folders}: the weights of {', '.join(built)} are those that encoders() makes")
    return notes


def newest_checkpoint(options: RunOptions) -> checkpoint.Whole | None:
    """The checkpoint that a run goes on from. Raises ``UserError`` where it must not write among those of another."""
    if options.checkpoint is None:
        return None
    if not options.resume:
        checkpoint.demand_empty(options.checkpoint)
        return None
    whole = checkpoint.newest(options.checkpoint)
    if whole is None:
        there = len(list(options.checkpoint.glob("step-*")))
        which = f"none of the {there} checkpoints in {options.checkpoint} is whole"
        none = which if there else f"no checkpoint in {options.checkpoint} yet"
        events.emit(report.Note(f"{none}: beginning at step 0"))
    return whole


def demand_average_goes_on(whole: checkpoint.Whole, training: Training, options: RunOptions) -> None:
    """A run that keeps no averages leaves those of its checkpoint behind: only where it is told to.

    Raises ``UserError`` where it is not. Notes it where it is.
    """
    if training.ema or not any(name.startswith(f"{AVERAGE}/") for name in checkpoint.tensors_of(whole)):
        return
    standing = msgspec.structs.replace(training, ema=0.5)
    if options.training(standing).ema:
        raise user_error(
            f"the checkpoint {whole.path} has averages of the weights (ema), and this run would keep none",
            help=(
                "give the decay that they were made with, such as --ema 0.999; or --ema 0 to end them here: `arachnec "
                "export --ema` writes them before"
            ),
        )
    events.emit(report.Note(f"the averages of the weights (ema) end with {whole.path}: this run keeps none"))


def demand_same_optimizer(whole: checkpoint.Whole, own: str) -> None:
    """The state of one class of optimizer means nothing to another, even where its tensors have the same names.

    Raises ``UserError`` where the checkpoint says another class than ``own``; those of before say none.
    """
    kept = whole.position.optimizer
    if isinstance(kept, str) and kept != own:
        raise user_error(
            f"the checkpoint {whole.path} has the state of {kept}, and this run would update with {own}",
            help=(
                f"resume with {kept}, by `optimizer.name` or the model file's `optimizer`; or start anew: `arachnec "
                "export` writes the weights, for --init and another --checkpoint folder"
            ),
        )


def kinds_left(stored: Iterable[str], kept: Iterable[str]) -> str | None:
    """A note of what a checkpoint has of the optimizer's state, say ``exp_avg``, and this run keeps of no parameter.

    Both are names of tensors, a kind and a parameter's name; averages have a rule of their own.
    """
    own = [name.split("/", 1) for name in kept if "/" in name]
    parameters, kinds = {name for kind, name in own if kind == "master"}, {kind for kind, _ in own}
    there = {kind for kind, _, name in (one.partition("/") for one in stored) if name in parameters}
    left = sorted(there - kinds - {AVERAGE, IN_USE})
    if not left:
        return None
    return f"the checkpoint has {', '.join(left)} of other options: this run goes on without"


JOB = "job.json"


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``job.json``: the launcher's name of the job, and the optimizer steps after which it ends."""

    name: str
    until: int


def end_of_job(
    folder: Path | None, done: int, asked: int | None, one_pass: int | None, *, restarted: bool
) -> int | None:
    """The steps in all after which to end, on all ranks alike: as many as were ``asked`` for, else what the job aimed
    at that a checkpoint of ``done`` steps goes on with, else ``one_pass``. None: when the batches end.

    A launcher that has ``restarted`` the job asks for nothing new. Collective.
    """
    end = asked if asked is not None else one_pass
    if folder is None or end is None:
        return end
    if dist.get_rank() == 0:
        own = os.environ.get("TORCHELASTIC_RUN_ID", "")
        before = _read(folder / JOB)
        if before is not None and ((restarted and before.name == own) or (asked is None and 0 < done < before.until)):
            end = before.until
        folder.mkdir(parents=True, exist_ok=True)
        draft = folder / f"{JOB}.draft"
        draft.write_bytes(msgspec.json.encode(Job(own, end)))
        draft.rename(folder / JOB)
    return int(gather_text(str(end))[0])


def _read(file: Path) -> Job | None:
    try:
        return msgspec.json.decode(file.read_bytes()[:4096], type=Job)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
