"""The stages of a pipeline on one process, one cascade after the other: what ``reference`` runs of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from arachnec.analysis.uses import split_backwards
from arachnec.backends.cascade_step import batch_of, loss_of
from arachnec.backends.stage_step import Deferred, as_inputs, backward_of, forms_between
from arachnec.backends.staged_model import Cuts, StageRun, parts_of
from arachnec.data.clip import VideoClip
from arachnec.executable.training_options import Training
from arachnec.ir.nodes import Cascade, Module, Phase
from arachnec.models.file import ModelFile
from arachnec.tracing.dataflow import Output

PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.WEIGHT)


@dataclass
class StagesInTurn:
    """One iteration. What stages hand on is kept by the name of the cascade that made it."""

    module: Module
    model: nn.Module
    model_file: ModelFile
    training: Training
    _runs: dict[str, tuple[StageRun, Tensor | None]] = field(default_factory=dict)
    _deferred: dict[str, Deferred] = field(default_factory=dict)
    _gradients: dict[str, Mapping[Output, Tensor]] = field(default_factory=dict)

    @cached_property
    def _stages(self) -> dict[str, int]:
        return {stage.name: number for number, stage in enumerate(parts_of(self.module))}

    @cached_property
    def _cuts(self) -> Cuts:
        return Cuts.of(self.model_file, self.training, parts_of(self.module))

    @cached_property
    def _split(self) -> frozenset[str]:
        """Forwards whose backward leaves the weight gradients for later."""
        split = split_backwards(self.module)
        return frozenset(name for c in self.module.cascades if c.name in split for name in c.inputs)

    def runs(self, cascade: Cascade) -> bool:
        """Whether this is a cascade of a pipeline."""
        return cascade.stage in self._stages and cascade.phase in PHASES

    def run(
        self,
        cascade: Cascade,
        clips: Sequence[VideoClip],
        encoded: Mapping[str, Tensor],
        step: int,
        device: torch.device,
    ) -> float:
        """Carry out one cascade; returns its share of the objective, which only the last stage has."""
        source = next((name for name in cascade.inputs if name in self._runs), "")
        if cascade.phase is Phase.WEIGHT:
            self._deferred.pop(source).run()
            return 0.0
        if cascade.phase is Phase.BACKWARD:
            run, objective = self._runs[source]
            received = next((self._gradients[name] for name in cascade.inputs if name in self._gradients), {})
            self._gradients[cascade.name] = backward_of(run, objective, received)
            return 0.0
        number = self._stages[cascade.stage]
        cut = self._cuts.at(clips[0], len(clips))
        given: dict[Output, Tensor] = {}
        if number:
            given = as_inputs(self._runs[source][0].outputs, forms_between(cut, number - 1))
        arguments, target = batch_of(self.model_file, clips, encoded, self.training, step, device)
        with self._deferring(cascade.name):
            run = self._cuts.forward(self.model, cut, number)(arguments, given)
            objective = None
            if run.prediction is not None:
                loss = loss_of(self.model_file, run.prediction, target)
                objective = loss * (len(cascade.clips) / len(self.module.clips))
        self._runs[cascade.name] = run, objective
        return 0.0 if objective is None else float(objective.detach())

    def _deferring(self, forward: str) -> Deferred | nullcontext[None]:
        if forward not in self._split:
            return nullcontext()
        return self._deferred.setdefault(forward, Deferred())
