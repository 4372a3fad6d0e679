"""The loss of the validation manifest: programs of training, run for their loss alone.

Nothing of it stays: gradients are dropped, buffers and random numbers are put back, and no parameter changes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import msgspec
import torch
from torch import nn

from arachnec.backends.cascade_step import in_step
from arachnec.backends.torch_distributed.batches.load_ahead import LoadAhead
from arachnec.backends.torch_distributed.batches.set_aside import tell_left_out
from arachnec.backends.torch_distributed.executor.interpreter import run_iteration
from arachnec.backends.torch_distributed.executor.iteration import Iteration, Share
from arachnec.backends.torch_distributed.plans.step_plans import Planned, Plans
from arachnec.backends.torch_distributed.rank.rank_context import RankContext
from arachnec.data.clip import VideoClip
from arachnec.executable.batches import shapes_key
from arachnec.executable.folder import Executable, iteration_of
from arachnec.executable.other_manifests import STEP, ValidationBatches, demand_same_manifests
from arachnec.executable.training_options import Training
from arachnec.runtime.agreement import gather
from arachnec.runtime.handoffs import TensorSpec
from arachnec.runtime.step_progress import Clock

MEASURES = Share(ends=False, measures=True)


@dataclass
class Validation:
    """Its plans are made beside the first steps of training. All methods are collective but ``due``."""

    every: int
    count: int
    _plans: Plans
    _planned: list[Planned] | None = None

    @classmethod
    def of(
        cls, executable: Executable, training: Training, rank: int, world: int, more_state: float
    ) -> Validation | None:
        """None without a validation manifest. Raises ``UserError`` for another one than was compiled."""
        demand_same_manifests(executable, training)
        batches = ValidationBatches(executable)
        if not len(batches):
            return None
        compiled = shapes_key(iteration_of(executable.traced, 0).clips)
        others = any(shapes_key(batches.draw(number).planned) != compiled for number in range(len(batches)))
        plans = Plans(executable, rank, world, batches, more_state=more_state, replans=others)
        for number in range(len(batches)):
            plans.prepare(number)
        return cls(training.validation.every, len(batches), plans)

    def due(self, steps: int) -> bool:
        """Whether it is asked for behind so many optimizer steps."""
        return steps % self.every == 0

    def planned(self) -> list[Planned]:
        """All batches, waited for the first time."""
        if self._planned is None:
            drawn = [self._plans.get(number) for number in range(self.count)]
            self._planned = [planned for planned in drawn if planned is not None]
            self.close()
        return self._planned

    def close(self) -> None:
        self._plans.close()


@dataclass
class ValidationLoss:
    """The mean over the clips of batches that were run one after the other; those set aside do not count."""

    total: float = 0.0
    clips: int = 0

    def add(self, context: RankContext, planned: Planned, received: Mapping[str, TensorSpec]) -> None:
        """Run one batch. Collective."""
        own = measuring(context)
        iteration = Iteration.of(planned.module, context.rank, planned.clips, received, STEP)
        run = run_iteration(own, replace(iteration, share=MEASURES), Clock(context.rank, context.runtime))
        tell_left_out("validation", run.left_out, own.loads.unreadable, planned.clips.values())
        aside = round(run.left_out.total())
        everyone = torch.stack(gather(torch.tensor([run.loss], dtype=torch.float64)))
        clips = len(planned.module.clips)
        self.total += float(everyone.sum()) * clips
        self.clips += clips - aside

    @property
    def mean(self) -> float | None:
        """None where no clip could be used, or the loss is not finite."""
        mean = self.total / self.clips if self.clips else math.nan
        return mean if math.isfinite(mean) else None


def measuring(context: RankContext) -> RankContext:
    """The rank as it measures: every clip has its caption, loads are its own, and links are not noted."""
    training = msgspec.structs.replace(context.training, caption_dropout=0.0)

    def read(clip: VideoClip, step: int) -> VideoClip:
        return in_step(training, clip, step)

    loads = LoadAhead(context.threads.loads, context.encoders, context.runtime, in_step=read)
    return replace(context, training=training, loads=loads, notes=None)


@contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Training goes on behind it as if nothing had run: random numbers and buffers are put back."""
    buffers = [(value, value.detach().clone()) for value in model.buffers()]
    on_cpu = device.type == "cpu"
    with torch.random.fork_rng([] if on_cpu else [device], device_type="cuda" if on_cpu else device.type):
        yield
    with torch.no_grad():
        for value, before in buffers:
            value.copy_(before)
