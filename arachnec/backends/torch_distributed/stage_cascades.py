"""One rank's cascades of a pipeline: forward, backward and weight gradients of its stages, and their messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arachnec.analysis.uses import split_backwards
from arachnec.backends.cascade_step import loss_of
from arachnec.backends.stage_step import (
    as_inputs,
    backward_of,
    forms_between,
    gradient_forms,
    pack,
    packed_size,
    unpack,
)
from arachnec.backends.staged_model import StageRun, run_stage
from arachnec.backends.torch_distributed.pipeline_rank import PipelineRank
from arachnec.backends.torch_distributed.side_by_side import own_part
from arachnec.backends.weight_gradients import Deferred
from arachnec.data.clip import VideoClip
from arachnec.ir.nodes import Cascade, Instruction, Module, Phase
from arachnec.model_state.cells.gradients import StageCells
from arachnec.models.file import ModelFile
from arachnec.runtime.handoffs import TensorSpec
from arachnec.tracing.cuts import Cut
from arachnec.tracing.dataflow import Form, Output


@dataclass
class _Saved:
    """What a forward keeps for its backward."""

    run: StageRun
    objective: Tensor | None
    number: int
    cut: Cut


@dataclass
class StageCascades:
    """Of one iteration. Messages are runs of bytes on the host or the device, as they are given."""

    pipeline: PipelineRank
    module: Module
    clips: Mapping[int, VideoClip]
    _saved: dict[str, _Saved] = field(default_factory=dict)
    _deferred: dict[str, Deferred] = field(default_factory=dict)

    def __post_init__(self) -> None:
        split = split_backwards(self.module)
        self._cascades = {cascade.name: cascade for cascade in self.module.cascades}
        self._split = {self.forward_of(self._cascades[name]) for name in split}

    def forward_of(self, cascade: Cascade) -> str:
        """The forward whose saved tensors a backward or weight cascade reads."""
        inputs = (self._cascades[name] for name in cascade.inputs)
        return next(c.name for c in inputs if c.stage == cascade.stage and c.phase is Phase.FORWARD)

    def before(self, cascade: Cascade) -> str | None:
        """The cascade of another stage whose message this one reads; none at the ends of the pipeline."""
        inputs = (self._cascades[name] for name in cascade.inputs)
        return next((c.name for c in inputs if c.phase is cascade.phase and c.stage != cascade.stage), None)

    def spec(self, name: str) -> TensorSpec:
        """Of the message that a cascade of another stage hands on to one of this rank: of that one's own clips."""
        rank = self.pipeline.rank
        readers = (c for c in self.module.cascades if name in c.inputs and rank in c.ranks)
        cut = self._cut(own_part(next(readers), rank))
        return TensorSpec((packed_size(self._forms(self._cascades[name], cut)),), torch.uint8)

    def _cut(self, cascade: Cascade) -> Cut:
        return self.pipeline.cuts.at(self.clips[cascade.clips[0]], len(cascade.clips))

    def _forms(self, cascade: Cascade, cut: Cut) -> Mapping[Output, Form]:
        number = self.pipeline.number(cascade.stage)
        if cascade.phase is Phase.FORWARD:
            return forms_between(cut, number)
        return gradient_forms(cut, number - 1) if number else {}

    def forward(
        self,
        cascade: Cascade,
        model: nn.Module,
        model_file: ModelFile,
        arguments: Mapping[str, Any],
        target: Tensor,
        message: Tensor | None,
        share: float,
        kept: Sequence[int] | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Run a stage on what it was handed. Returns its share of the objective, or its message to the next stage.

        ``share`` is what the mean loss of these clips counts; only those ``kept`` do, by number.
        """
        number, cut = self.pipeline.number(cascade.stage), self._cut(cascade)
        given: dict[Output, Tensor] = {}
        if message is not None:
            forms = forms_between(cut, number - 1)
            given = as_inputs(unpack(message, forms), forms)
        objective = None
        with self.deferring(cascade.name) or nullcontext():
            run = run_stage(model, cut, number, arguments, given)
            if run.prediction is not None:
                objective = loss_of(model_file, run.prediction, target, kept) * share
        self._saved[cascade.name] = _Saved(run, objective, number, cut)
        if objective is not None:
            return objective, None
        return None, pack(run.outputs, forms_between(cut, number))

    def backward(self, cascade: Cascade, message: Tensor | None, group: dist.ProcessGroup | None) -> Tensor | None:
        """Run a stage's backward on the ranks of ``group``. Returns its message to the stage before; the first has
        none.

        Every rank has a part of the gradient of what the stage was handed. It goes to one rank of the stage before,
        which takes it for its own part. Where that stage has another degree, the parts are added up, and each of its
        ranks takes an equal share.
        """
        name = self.forward_of(cascade)
        saved = self._saved.pop(name)
        received = {} if message is None else unpack(message, gradient_forms(saved.cut, saved.number))
        gradients = backward_of(saved.run, saved.objective, received)
        if not saved.number:
            return None
        forms = gradient_forms(saved.cut, saved.number - 1)
        if (degree := self._degree_before(cascade)) != cascade.degree:
            given = saved.run.given
            gradients = {output: _share(given[output], group, degree) for output in forms}
        return pack(gradients, forms)

    def _degree_before(self, cascade: Cascade) -> int:
        """The degree of the stage that reads this one's gradient; its own where that stage is frozen."""
        readers = (c for c in self.module.cascades if cascade.name in c.inputs)
        others = (c.degree for c in readers if c.stage != cascade.stage and c.phase is Phase.BACKWARD)
        return next(others, cascade.degree)

    def weight(self, instruction: Instruction, cascade: Cascade, cells: StageCells | None) -> None:
        """The weight gradients that a split backward left; layer by layer where they are dealt out over ``cells``."""
        deferred = self._deferred.pop(self.forward_of(cascade))
        if cells is not None:
            layers: dict[int, set[int]] = {}
            for flat in cells.flats:
                layers.setdefault(flat.layout.layer, set()).update(map(id, flat.parameters.values()))
            cells.gathering.weight(instruction, lambda number: deferred.run(layers.get(number, ())))
        deferred.run()

    def deferring(self, forward: str) -> Deferred | None:
        """What keeps the weight gradients of a forward's blocks for later; None where the backward has them."""
        return self._deferred.setdefault(forward, Deferred()) if forward in self._split else None


@torch.no_grad()
def _share(given: Tensor, group: dist.ProcessGroup | None, degree: int) -> Tensor:
    """The sum of all ranks' parts of a value's gradient over ``degree``, added up in fp32 at least. Collective."""
    precise = torch.promote_types(given.dtype, torch.float32)
    part = torch.zeros_like(given) if given.grad is None else given.grad
    total = part.detach().to(precise, copy=True)
    if group is not None:
        dist.all_reduce(total, group=group)
    return (total / degree).to(given.dtype)


def encoders_of(cascade: Cascade, cascades: Mapping[str, Cascade]) -> Sequence[str]:
    """The encoders among a cascade's inputs."""
    return [name for name in cascade.inputs if cascades[name].phase is Phase.ENCODE]
