"""What one rank sends to other stages and gets from them, of one micro-batch: which tensors, whose tokens of them.

A message is a run of bytes. Where two stages share the tokens alike it holds this rank's own of what blocks made. Where
they share them otherwise it has a part for every rank of the other stage that has some of the same tokens; one of the
parts brings all else along (``analysis.stage_handoffs``). What no block made, or has no tokens, goes whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from arachnec.analysis.stage_handoffs import (
    STAGED,
    TokenRange,
    forward_of,
    in_ranges,
    ranges_from,
    ranges_to,
    shards_of,
    share_tokens_alike,
)
from arachnec.analysis.uses import split_backwards
from arachnec.backends.stage_step import ALIGNED, as_message, forms_between, gradient_forms, pack, packed_size, unpack
from arachnec.backends.torch_distributed.executor.shared_clips import own_part
from arachnec.backends.torch_distributed.rank.pipeline_rank import PipelineRank
from arachnec.backends.torch_distributed.rank.rank_context import SequenceParallel
from arachnec.data.clip import VideoClip
from arachnec.ir.nodes import Cascade, Module, Phase
from arachnec.kernels.attention.sequence_shard import rescaled_tokens
from arachnec.runtime.handoffs import TensorSpec
from arachnec.tracing.dataflow import Cut, Form, Output


@dataclass(frozen=True)
class Part:
    """Of a message: what goes to or comes from the rank ``peer``, and at which of this rank's tokens it begins."""

    peer: int
    forms: Mapping[Output, Form]
    first: int = 0


@dataclass(frozen=True)
class Message:
    """``own`` are the forms of what this rank has or gets in all, ``dims`` the dimensions of its tokens in them."""

    parts: tuple[Part, ...]
    own: Mapping[Output, Form]
    dims: Mapping[Output, int]

    @cached_property
    def places(self) -> tuple[slice, ...]:
        """Where every part lies."""
        sizes = [max(ALIGNED, packed_size(part.forms)) for part in self.parts]
        return tuple(slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True))

    @cached_property
    def size(self) -> int:
        return self.places[-1].stop if self.parts else 0

    def pack(self, values: Mapping[Output, Tensor]) -> Tensor:
        """The bytes of all parts; a tensor that is not there is zeros."""
        if len(self.parts) == 1 and (alone := as_message(values, self.parts[0].forms)) is not None:
            return alone
        device = next((value.device for value in values.values()), torch.device("cpu"))
        message = torch.empty(self.size, dtype=torch.uint8, device=device)
        for part, place in zip(self.parts, self.places, strict=True):
            pack({o: self._of_part(o, values[o], part) for o in part.forms if o in values}, part.forms, message[place])
        return message

    def _of_part(self, output: Output, value: Tensor, part: Part) -> Tensor:
        if output not in self.dims:
            return value
        dim = self.dims[output]
        return value.narrow(dim, part.first, part.forms[output].shape[dim])

    def unpack(self, message: Tensor) -> dict[Output, Tensor]:
        """The tensors: views, except for those that are put together from several parts."""
        parts = [unpack(message[place], part.forms) for part, place in zip(self.parts, self.places, strict=True)]
        return {output: self._joined(output, form, parts, message) for output, form in self.own.items()}

    def _joined(self, output: Output, form: Form, parts: Sequence[Mapping[Output, Tensor]], message: Tensor) -> Tensor:
        pieces = [part[output] for part in parts if output in part]
        if not pieces:  # a rank without tokens
            return torch.empty(form.shape, dtype=form.dtype, device=message.device)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, self.dims[output])


@dataclass
class StageMessages:
    """Of one rank in one program, for all steps that run it; ``clips`` are those of one of them."""

    pipeline: PipelineRank
    module: Module
    clips: InitVar[Mapping[int, VideoClip]]
    sequence: SequenceParallel | None = None  # None: no cascade has several ranks
    _sent: dict[str, dict[int, slice]] = field(default_factory=dict)
    _cuts: dict[str, Cut] = field(default_factory=dict)
    _coming: dict[str, Message] = field(default_factory=dict)
    _going: dict[str, Message] = field(default_factory=dict)

    def __post_init__(self, clips: Mapping[int, VideoClip]) -> None:
        self.cascades = {cascade.name: cascade for cascade in self.module.cascades}
        self._stages = {stage.name: stage for stage in self.module.stages}
        self._before = {cascade.name: self._read_by(cascade) for cascade in self.module.cascades}
        for cascade in self.module.cascades:
            if cascade.phase in STAGED and self.pipeline.rank in cascade.ranks:
                own = own_part(cascade, self.pipeline.rank).clips
                self._cuts[cascade.name] = self.pipeline.cuts.at(clips[own[0]], len(own))
        # of what a cascade hands on to another stage
        self.readers = {name: self.cascades[reader] for reader, name in self._before.items() if name is not None}

    @cached_property
    def split(self) -> frozenset[str]:
        """The forwards whose backward leaves the weight gradients for later."""
        backwards = (self.cascades[name] for name in split_backwards(self.module))
        return frozenset(forward_of(backward, self.cascades).name for backward in backwards)

    def before(self, cascade: Cascade) -> str | None:
        """The cascade of another stage whose message this one reads; none at the ends of the pipeline."""
        return self._before[cascade.name]

    def _read_by(self, cascade: Cascade) -> str | None:
        inputs = (self.cascades[name] for name in cascade.inputs)
        return next((c.name for c in inputs if c.phase is cascade.phase and c.stage != cascade.stage), None)

    def spec(self, name: str) -> TensorSpec:
        """Of the message that a cascade of another stage hands on to one of this rank: of that one's own clips."""
        reader = self.readers[name]
        message = self.coming(name, self.cut(reader))
        parts: tuple[tuple[int, int, int], ...] = ()
        if self._in_ranges(self.cascades[name], reader):
            places = zip(message.parts, message.places, strict=True)
            parts = tuple((part.peer, place.start, place.stop) for part, place in places)
        return TensorSpec((message.size,), torch.uint8, parts)

    def cut(self, cascade: Cascade) -> Cut:
        """Of this rank's clips of a cascade."""
        return self._cuts[cascade.name]

    def coming(self, name: str, cut: Cut) -> Message:
        """What this rank gets of what a cascade of another stage hands on."""
        if name not in self._coming:
            producer, reader = self.cascades[name], self.readers[name]
            self._coming[name] = self._message(producer, reader, cut, reader)
        return self._coming[name]

    def going(self, cascade: Cascade, cut: Cut) -> Message:
        """What this rank hands on of a cascade; whole where no other stage reads it. ``dims`` are of its own tokens
        alone."""
        name = cascade.name
        if name not in self._going:
            producer = self.cascades[name]
            message = self._message(producer, self.readers.get(name), cut, producer)
            self._sent[name] = {p.peer: place for p, place in zip(message.parts, message.places, strict=True)}
            self._going[name] = message
        return self._going[name]

    def sent_to(self, name: str, peer: int) -> slice | None:
        """The part of a message of this rank that goes to a rank; None where all of it does."""
        return self._sent.get(name, {}).get(peer)

    def _message(self, producer: Cascade, consumer: Cascade | None, cut: Cut, own: Cascade) -> Message:
        forms, dims = self._forms(producer, cut), self._token_dims(producer, consumer, cut)
        mine = self._with_own_tokens(forms, dims, own)
        if consumer is None or not self._in_ranges(producer, consumer):
            return Message((Part(-1, mine),) if mine else (), mine, dims)
        rank, ranges = self.pipeline.rank, ranges_to if own is consumer else ranges_from
        position = own.ranks.index(rank) % own.degree
        begin = sum(shards_of(own, self.cascades)[:position])
        parts = (
            Part(
                one.source if own is consumer else one.target,
                dict(_of_range(forms, dims, one)),
                max(0, one.first - begin),
            )
            for one in ranges(producer, consumer, rank, self.cascades)
        )
        return Message(tuple(parts), mine, dims)

    def _in_ranges(self, producer: Cascade, consumer: Cascade) -> bool:
        return in_ranges(producer, consumer, self._stages, self.cascades)

    def _forms(self, cascade: Cascade, cut: Cut) -> Mapping[Output, Form]:
        number = self.pipeline.number(cascade.stage)
        if cascade.phase is Phase.FORWARD:
            return forms_between(cut, number)
        return gradient_forms(cut, number - 1) if number else {}

    def _token_dims(self, producer: Cascade, consumer: Cascade | None, cut: Cut) -> dict[Output, int]:
        """Of what goes between two cascades, along which dimension each rank hands on its own tokens."""
        if self.sequence is None or consumer is None:
            return {}
        ranges = self._in_ranges(producer, consumer)
        if not ranges and not share_tokens_alike(producer, consumer, self.cascades):
            return {}
        calls, tokens = cut.flow.calls, forward_of(consumer, self.cascades).tokens
        dims: dict[Output, int] = {}
        for output, form in self._forms(producer, cut).items():
            call = calls[output.call]
            dim = self.sequence.token_dims(call.path).get(output.leaf) if call.is_block else None
            if dim is not None and (not ranges or form.shape[dim] == tokens):
                dims[output] = dim
        return dims

    def _with_own_tokens(
        self, forms: Mapping[Output, Form], dims: Mapping[Output, int], cascade: Cascade
    ) -> dict[Output, Form]:
        """The forms with this rank's tokens of them, as a cascade of its stage shares them."""
        shards = shards_of(cascade, self.cascades)
        position = cascade.ranks.index(self.pipeline.rank) % cascade.degree
        own = dict(forms)
        for output, dim in dims.items():
            length = forms[output].shape[dim]
            shares = shards if length == sum(shards) else rescaled_tokens(shards, length)
            own[output] = _resized(forms[output], dim, shares[position])
        return own


def _of_range(forms: Mapping[Output, Form], dims: Mapping[Output, int], one: TokenRange) -> Mapping[Output, Form]:
    size = one.end - one.first
    own = {output: _resized(forms[output], dim, size) for output, dim in dims.items() if size}
    rest = {output: form for output, form in forms.items() if output not in dims and one.rest}
    return {output: (own | rest)[output] for output in forms if output in own or output in rest}


def _resized(form: Form, dim: int, length: int) -> Form:
    return replace(form, shape=(*form.shape[:dim], length, *form.shape[dim + 1 :]))
