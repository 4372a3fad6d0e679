"""One rank's cascades of a pipeline: forward, backward and weight gradients of its stages, and their messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arachnec.analysis.stage_handoffs import forward_of
from arachnec.backends.cascade_step import loss_of
from arachnec.backends.stage_step import Deferred, as_inputs, backward_of, forms_between
from arachnec.backends.staged_model import StageRun, whole
from arachnec.backends.torch_distributed.executor.stage_messages import StageMessages
from arachnec.backends.torch_distributed.rank.rank_context import SequenceParallel
from arachnec.ir.nodes import Cascade, Instruction, Phase
from arachnec.model_state.cells.gradients import ShardGradients, StageCells
from arachnec.model_state.gradients import GradientSynchronisation
from arachnec.models.file import ModelFile
from arachnec.tracing.dataflow import Cut, Form, Output


@dataclass
class _Saved:
    """What a forward keeps for its backward."""

    run: StageRun
    objective: Tensor | None
    number: int
    cut: Cut


@dataclass
class StageCascades:
    """Of one iteration. Messages are runs of bytes on the host or the device, as they are given.

    Each rank hands on its own tokens of what blocks made of them.
    """

    messages: StageMessages
    sequence: SequenceParallel | None = None  # None: no cascade has several ranks
    _saved: dict[str, _Saved] = field(default_factory=dict)
    _deferred: dict[str, Deferred] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pipeline = self.messages.pipeline

    def forward_of(self, cascade: Cascade) -> str:
        """The forward whose saved tensors a backward or weight cascade reads."""
        return forward_of(cascade, self.messages.cascades).name

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
        number, cut = self.pipeline.number(cascade.stage), self.messages.cut(cascade)
        given: dict[Output, Tensor] = {}
        complete: dict[Output, Tensor] = {}  # as the model's forward reads them
        if message is not None:
            coming = self.messages.coming(str(self.messages.before(cascade)), cut)
            given = as_inputs(coming.unpack(message), coming.own)
            forms = forms_between(cut, number - 1)
            complete = {
                output: self._of_tokens(value, coming.dims[output], forms[output])
                if output in coming.dims and cascade.degree > 1
                else value
                for output, value in given.items()
            }
        going = self.messages.going(cascade, cut)

        def handing(output: Output, value: Tensor) -> Tensor:
            if output not in going.dims or self.sequence is None or cascade.degree == 1:
                return whole(output, value)
            return self.sequence.own_tokens(value, going.dims[output])

        objective = None
        forward = self.pipeline.cuts.forward(model, cut, number)
        with self.deferring(cascade.name) or nullcontext():
            run = replace(forward(arguments, complete, handing), given=given)
            if run.prediction is not None:
                objective = loss_of(model_file, run.prediction, target, kept, share)
        self._saved[cascade.name] = _Saved(run, objective, number, cut)
        if objective is not None:
            return objective, None
        return None, going.pack(run.outputs)

    def _of_tokens(self, local: Tensor, dim: int, form: Form) -> Tensor:
        assert self.sequence is not None, "ranks share the sequence"
        return self.sequence.of_tokens(local, dim, form.shape[dim])

    def backward(self, cascade: Cascade, message: Tensor | None, group: dist.ProcessGroup | None) -> Tensor | None:
        """Run a stage's backward on the ranks of ``group``. Returns its message to the stage before; the first has
        none.

        Every rank has the gradient of the tokens that it was handed, and a part of the gradient of all else. That goes
        to one rank of the stage before, which takes it for its own part. Where that stage has another degree, the parts
        are added up, and each of its ranks takes an equal share.
        """
        name = self.forward_of(cascade)
        saved = self._saved.pop(name)
        received: dict[Output, Tensor] = {}
        if message is not None:
            received = self.messages.coming(str(self.messages.before(cascade)), saved.cut).unpack(message)
        gradients = backward_of(saved.run, saved.objective, received)
        if not saved.number:
            return None
        going = self.messages.going(cascade, saved.cut)
        if (degree := self._degree_before(cascade)) != cascade.degree:
            given = saved.run.given
            gradients |= {o: _share(given[o], group, degree) for o in going.own if o not in going.dims}
        return going.pack(gradients)

    def _degree_before(self, cascade: Cascade) -> int:
        """The degree of the stage that reads this one's gradient; its own where that stage is frozen."""
        reader = self.messages.readers.get(cascade.name)
        return cascade.degree if reader is None else reader.degree

    def weight(
        self,
        instruction: Instruction,
        cascade: Cascade,
        cells: StageCells | None,
        gradients: GradientSynchronisation | ShardGradients,
        reduces: Sequence[Instruction] = (),
    ) -> None:
        """The weight gradients that a split backward left; layer by layer where they are dealt out over ``cells``.

        The all-reduces ``reduces`` of the stage's ``gradients`` start inside, each when its own are whole.
        """
        deferred = self._deferred.pop(self.forward_of(cascade))
        if cells is not None:
            layers: dict[int, set[int]] = {}
            for flat in cells.flats:
                layers.setdefault(flat.layout.layer, set()).update(map(id, flat.parameters.values()))
            with gradients.inside_backward(reduces):
                cells.gathering.weight(instruction, lambda number: deferred.run(layers.get(number, ())))
        else:
            gradients.start_behind(reduces, deferred.run)
        deferred.run()

    def deferring(self, forward: str) -> Deferred | None:
        """What keeps the weight gradients of a forward's blocks for later; None where the backward has them."""
        graphs = self.sequence is not None
        return self._deferred.setdefault(forward, Deferred(graphs)) if forward in self.messages.split else None


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
