"""Two steps of a program on all of its ranks, which are forked, and two of ``reference``: as numbers to compare.

The second step begins with the weights that the first one left: so it also tells a wrong update, one that a rank left
out, and one that was not gathered.

A fork shares what is imported and captured already, so a rank is up in milliseconds. This process may have run no
backward before: autograd does not survive a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from arachnec.backends.cascade_step import build_model, trained_parameters
from arachnec.backends.reference import Outcome, run_reference
from arachnec.backends.torch_distributed.batches.load_ahead import encoded_here
from arachnec.backends.torch_distributed.executor.encoding import Specs
from arachnec.backends.torch_distributed.executor.interpreter import run_iteration
from arachnec.backends.torch_distributed.executor.iteration import Iteration, program_of
from arachnec.backends.torch_distributed.executor.stage_messages import StageMessages
from arachnec.backends.torch_distributed.rank.rank_context import RankContext, set_up_rank
from arachnec.backends.torch_distributed.rank.sharded_blocks import needs_sequence
from arachnec.equivalence.small_program import Small
from arachnec.executable.training_options import TorchClass, Training
from arachnec.ir.diagnostic import UserError
from arachnec.ir.nodes import Cascade, Level, Module, Phase, Stage
from arachnec.model_state.kept_gradients import keep_gradients
from arachnec.models.file import ModelFile
from arachnec.runtime.step_progress import Clock
from arachnec.spmd.sharded_model import install
from arachnec.spmd.specialise import Specialisation, captured_again
from arachnec.tracing.captured import CapturedModel

CPU = torch.device("cpu")
STEPS = 2
# Updates that are in proportion to the gradient: what is rounding there stays rounding in the weights. The norm counts
# in both steps, because it is clipped to less than any batch has.
TRAINING = Training(lr=0.5, clip_norm=1e-2, optimizer=TorchClass("SGD"))
EPSILON = 1e-6  # as torch clips


@dataclass(frozen=True)
class Step:
    """The objective of a step; its gradient by parameter where it is whole."""

    loss: float
    gradients: Mapping[str, Tensor]


@dataclass(frozen=True)
class OnRank:
    """``weights`` are the parameters that lie whole on the rank, after the last step."""

    steps: tuple[Step, ...]
    weights: Mapping[str, Tensor]


def captured_blocks(small: Small, model_file: ModelFile) -> CapturedModel | None:
    """What ranks share a clip with, or compute again; None where none does. Once, before ranks are forked."""
    torch.optim.SGD([torch.nn.Parameter(torch.empty(0))])  # imports what takes a second on every rank
    if not needs_sequence(small.module):
        return None
    with torch.device("meta"):
        model = model_file.build()
    return captured_again(Specialisation(), model, model_file, list(small.clips.values()))


def run_rank(small: Small, model_file: ModelFile, captured: CapturedModel | None, rank: int) -> OnRank:
    """The program's two steps on this rank. Collective."""
    module, clips = small.module, small.clips
    context = set_up_rank(model_file, TRAINING, module, list(clips.values()), CPU)
    keep_gradients(context.parameters, module)
    context.connect(module)
    if captured is not None:
        context = replace(context, sequence=install(context.model, captured))
    own = program_of(module, rank)
    received = Specs(model_file, context.encoders, CPU).received(module, own, clips)
    if context.pipeline is not None:
        staged = StageMessages(context.pipeline, module, clips, context.sequence)
        names = {step.target for step in own.instructions if step.op == "receive"}
        received |= {name: staged.spec(name) for name in names - set(received)}
    cascades = {cascade.name: cascade for cascade in module.cascades}
    steps = []
    for number in range(STEPS):
        iteration = Iteration.of(module, rank, clips, received, number)
        context.loads.want(number, encoded_here(own, cascades, clips))
        whole: dict[str, Tensor] = {}
        keep = partial(_keep, whole)
        run = run_iteration(context, iteration, Clock(rank, context.runtime), keep)
        steps.append(Step(run.loss, whole if rank == 0 else {}))
    dealt_out = context.cells is not None or any("sharded" in stage.attrs for stage in module.stages)
    weights = {} if dealt_out else _copied(_on_this_rank(context))
    context.threads.close()
    return OnRank(tuple(steps), weights)


def _on_this_rank(context: RankContext) -> dict[str, Tensor]:
    own = None if context.pipeline is None else context.pipeline.own
    return {name: value for name, value in context.parameters.items() if own is None or name in own}


def _keep(whole: dict[str, Tensor], shown: Mapping[str, Tensor]) -> None:
    whole.update(_copied(shown))


def _copied(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in values.items()}


def run_reference_steps(small: Small, model_file: ModelFile) -> OnRank:
    """The same steps, clip by clip in one process, with an update written by hand."""
    plain = plain_batch(small.module)
    model = build_model(model_file, TRAINING, CPU)
    parameters = trained_parameters(model)
    steps = []
    for number in range(STEPS):
        outcome = run_reference(plain, model_file, small.clips, TRAINING, step=number, model=model)
        steps.append(Step(outcome.loss, outcome.gradients))
        _update(parameters, outcome)
    return OnRank(tuple(steps), _copied(parameters))


@torch.no_grad()
def _update(parameters: Mapping[str, Tensor], outcome: Outcome) -> None:
    norm = torch.linalg.vector_norm(torch.stack([value.norm() for value in outcome.gradients.values()]))
    factor = min(1.0, TRAINING.clip_norm / (float(norm) + EPSILON))
    for name, gradient in outcome.gradients.items():
        parameters[name] -= TRAINING.lr * factor * gradient


def plain_batch(module: Module) -> Module:
    """The module's clips, each in a train cascade of its own, encoded by every encoder that has it: from the clips
    alone, whatever else the program says."""
    encoded = {(c.stage, clip) for c in module.cascades if c.phase is Phase.ENCODE for clip in c.clips}
    cascades = []
    for clip in module.clips:
        inputs = []
        for number, stage in enumerate(module.stages):
            if (stage.name, clip.id) in encoded:
                inputs.append(f"encoded_{clip.id}_{number}")
                cascades.append(Cascade(inputs[-1], Phase.ENCODE, stage.name, (clip.id,), 1, clip.tokens, 0))
        name = f"trained_{clip.id}"
        cascades.append(Cascade(name, Phase.TRAIN, "model", (clip.id,), 1, clip.tokens, 0, tuple(inputs)))
    frozen = tuple(stage for stage in module.stages if not stage.trained)
    stages = (*frozen, Stage("model", True))
    return Module("plain", Level.PARTITIONED, module.cluster, module.clips, stages, (), tuple(cascades))


class Failed(Exception):
    """A rank that raised, died, or did not end in time; ``text`` is what it said."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(f"rank {rank}: {text}")
        self.rank, self.text = rank, text


def on_forked_ranks(world: int, work: Callable[[int], Any], seconds: float) -> list[Any]:
    """``work(rank)`` on ranks of one gloo world. Raises ``Failed`` for the first that fails, and ends all."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="arachnec-ranks-") as folder:
        pipes: list[Connection] = []
        processes = []
        try:
            for rank in range(world):
                ours, theirs = context.Pipe(duplex=False)
                args = (rank, world, Path(folder) / "store", seconds, work, theirs)
                process = context.Process(target=_serve, args=args, daemon=True)
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            return _collect(pipes, seconds)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()
            for pipe in pipes:
                pipe.close()


def _collect(pipes: Sequence[Connection], seconds: float) -> list[Any]:
    results: dict[int, Any] = {}
    end = time.monotonic() + seconds
    while len(results) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = wait(list(waiting), max(0.0, end - time.monotonic()))
        if not ready:
            raise Failed(min(waiting.values()), f"it did not end within {seconds:g} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting[pipe]
            try:
                failed, answer = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                raise Failed(rank, "its process died") from None
            if failed:
                raise Failed(rank, answer)
            results[rank] = answer
    return [results[rank] for rank in range(len(pipes))]


def _serve(rank: int, world: int, store: Path, seconds: float, work: Callable[[int], Any], pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["TORCH_GLOO_LAZY_INIT"] = "1"
    timeout = timedelta(seconds=seconds)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
        answer = False, work(rank)
        dist.barrier()  # nobody closes what another still reads
    except UserError as error:
        answer = True, str(error)
    except BaseException:
        answer = True, traceback.format_exc()
    pipe.send_bytes(pickle.dumps(answer))
