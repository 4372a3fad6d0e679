"""One rank's cascades of a pipeline: forward, backward and weight gradients of its stages, and their messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from arachnec.analysis.stage_handoffs import forward_of, share_tokens_alike
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
from arachnec.backends.staged_model import StageRun, run_stage, whole
from arachnec.backends.torch_distributed.pipeline_rank import PipelineRank
from arachnec.backends.torch_distributed.rank_context import SequenceParallel
from arachnec.backends.torch_distributed.side_by_side import own_part
from arachnec.backends.weight_gradients import Deferred
from arachnec.data.clip import VideoClip
from arachnec.ir.nodes import Cascade, Instruction, Module, Phase, integers
from arachnec.kernels.attention.sequence_shard import even_split, rescaled_tokens
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
    """Of one iteration. Messages are runs of bytes on the host or the device, as they are given.

    Where two stages share a micro-batch's tokens alike, each rank hands on its own tokens of what blocks made of them.
    """

    pipeline: PipelineRank
    module: Module
    clips: Mapping[int, VideoClip]
    sequence: SequenceParallel | None = None  # None: no cascade has several ranks
    _saved: dict[str, _Saved] = field(default_factory=dict)
    _deferred: dict[str, Deferred] = field(default_factory=dict)

    def __post_init__(self) -> None:
        split = split_backwards(self.module)
        self._cascades = {cascade.name: cascade for cascade in self.module.cascades}
        self._split = {self.forward_of(self._cascades[name]) for name in split}
        self._readers: dict[str, Cascade] = {}  # of what a cascade hands on to another stage
        for reader in self.module.cascades:
            if (name := self.before(reader)) is not None:
                self._readers[name] = reader

    def forward_of(self, cascade: Cascade) -> str:
        """The forward whose saved tensors a backward or weight cascade reads."""
        return forward_of(cascade, self._cascades).name

    def before(self, cascade: Cascade) -> str | None:
        """The cascade of another stage whose message this one reads; none at the ends of the pipeline."""
        inputs = (self._cascades[name] for name in cascade.inputs)
        return next((c.name for c in inputs if c.phase is cascade.phase and c.stage != cascade.stage), None)

    def spec(self, name: str) -> TensorSpec:
        """Of the message that a cascade of another stage hands on to one of this rank: of that one's own clips."""
        producer, reader = self._cascades[name], self._readers[name]
        cut = self._cut(own_part(reader, self.pipeline.rank))
        forms = self._own_forms(self._forms(producer, cut), self._token_dims(producer, reader, cut), reader)
        return TensorSpec((packed_size(forms),), torch.uint8)

    def _cut(self, cascade: Cascade) -> Cut:
        return self.pipeline.cuts.at(self.clips[cascade.clips[0]], len(cascade.clips))

    def _forms(self, cascade: Cascade, cut: Cut) -> Mapping[Output, Form]:
        number = self.pipeline.number(cascade.stage)
        if cascade.phase is Phase.FORWARD:
            return forms_between(cut, number)
        return gradient_forms(cut, number - 1) if number else {}

    def _token_dims(self, producer: Cascade, consumer: Cascade | None, cut: Cut) -> dict[Output, int]:
        """Of what goes between two cascades, along which dimension each rank hands on its own tokens."""
        if self.sequence is None or consumer is None or not share_tokens_alike(producer, consumer, self._cascades):
            return {}
        calls = cut.flow.calls
        of_blocks = (output for output in self._forms(producer, cut) if calls[output.call].is_block)
        dims = ((output, self.sequence.token_dims(calls[output.call].path).get(output.leaf)) for output in of_blocks)
        return {output: dim for output, dim in dims if dim is not None}

    def _own_forms(
        self, forms: Mapping[Output, Form], dims: Mapping[Output, int], cascade: Cascade
    ) -> Mapping[Output, Form]:
        """The forms with this rank's tokens of them, as a cascade of its stage shares them."""
        if not dims:
            return forms
        return {
            output: self._own_form(form, dims[output], cascade) if output in dims else form
            for output, form in forms.items()
        }

    def _own_form(self, form: Form, dim: int, cascade: Cascade) -> Form:
        shared = self._cascades[self.forward_of(cascade)]
        listed = shared.attrs.get("shards")
        shards = even_split(shared.tokens, shared.degree) if listed is None else integers(listed)
        if form.shape[dim] != sum(shards):
            shards = rescaled_tokens(shards, form.shape[dim])
        position = shared.ranks.index(self.pipeline.rank) % shared.degree
        return replace(form, shape=(*form.shape[:dim], shards[position], *form.shape[dim + 1 :]))

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
        complete: dict[Output, Tensor] = {}  # as the model's forward reads them
        if message is not None:
            forms = forms_between(cut, number - 1)
            coming = self._token_dims(self._cascades[str(self.before(cascade))], cascade, cut)
            own = self._own_forms(forms, coming, cascade)
            given = as_inputs(unpack(message, own), own)
            complete = {
                output: self._of_tokens(value, coming[output], forms[output]) if output in coming else value
                for output, value in given.items()
            }
        going = self._token_dims(cascade, self._readers.get(cascade.name), cut)

        def handing(output: Output, value: Tensor) -> Tensor:
            if output not in going or self.sequence is None:
                return whole(output, value)
            return self.sequence.own_tokens(value, going[output])

        objective = None
        with self.deferring(cascade.name) or nullcontext():
            run = replace(run_stage(model, cut, number, arguments, complete, handing), given=given)
            if run.prediction is not None:
                objective = loss_of(model_file, run.prediction, target, kept) * share
        self._saved[cascade.name] = _Saved(run, objective, number, cut)
        if objective is not None:
            return objective, None
        return None, pack(run.outputs, self._own_forms(forms_between(cut, number), going, cascade))

    def _of_tokens(self, local: Tensor, dim: int, form: Form) -> Tensor:
        assert self.sequence is not None, "ranks share the sequence"
        return self.sequence.of_tokens(local, dim, form.shape[dim])

    def backward(self, cascade: Cascade, message: Tensor | None, group: dist.ProcessGroup | None) -> Tensor | None:
        """Run a stage's backward on the ranks of ``group``. Returns its message to the stage before; the first has
        none.

        Every rank has the gradient of the tokens that it was handed, and a part of the gradient of all else. It goes to
        one rank of the stage before, which takes it for its own part. Where that stage has another degree, the parts
        are added up, and each of its ranks takes an equal share.
        """
        name = self.forward_of(cascade)
        saved = self._saved.pop(name)
        received: dict[Output, Tensor] = {}
        if message is not None:
            behind = self._cascades[str(self.before(cascade))]
            coming = self._token_dims(behind, cascade, saved.cut)
            forms = gradient_forms(saved.cut, saved.number)
            received = unpack(message, self._own_forms(forms, coming, cascade))
        gradients = backward_of(saved.run, saved.objective, received)
        if not saved.number:
            return None
        going = self._token_dims(cascade, self._readers.get(cascade.name), saved.cut)
        forms = self._own_forms(gradient_forms(saved.cut, saved.number - 1), going, cascade)
        if (degree := self._degree_before(cascade)) != cascade.degree:
            given = saved.run.given
            gradients = {output: _share(given[output], group, degree) for output in forms}
        return pack(gradients, forms)

    def _degree_before(self, cascade: Cascade) -> int:
        """The degree of the stage that reads this one's gradient; its own where that stage is frozen."""
        reader = self._readers.get(cascade.name)
        return cascade.degree if reader is None else reader.degree

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
