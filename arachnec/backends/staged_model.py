"""A model whose forward runs one of its stages. In: the micro-batch's arguments, what the stage before handed on.

The model's own forward runs on every stage, with every unit (``tracing.dataflow``) that belongs to another stage
standing aside: one of an earlier stage returns what was handed on of it, one of a later stage ends the forward. What
lies between the units has no parameters and is made again. So a model whose forward branches on its arguments, keeps
skip connections or calls its blocks in turns needs nothing of its own; exporting everything around the blocks would
have to succeed for it first.

What a unit of an earlier stage made and nobody needs here is zeros without memory, and so are parameters that are not
on this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from arachnec.backends.cascade_step import DTYPES, build_model
from arachnec.data.clip import VideoClip
from arachnec.executable.training_options import Training
from arachnec.ir.diagnostic import Diagnostic, UserError
from arachnec.ir.gradient_buckets import layers_of
from arachnec.ir.nodes import Module, Stage
from arachnec.models.batch import prediction_of
from arachnec.models.cast_samples import CastSamples
from arachnec.models.file import ModelFile
from arachnec.tracing.cuts import Cut
from arachnec.tracing.dataflow import Form, Given, Output, record_dataflow, replaced
from arachnec.tracing.find import find_blocks
from arachnec.tracing.record import Repeats
from arachnec.tracing.sample import arguments_of, meta_encoders, tiled

META = torch.device("meta")


@dataclass(frozen=True)
class OtherForward(Diagnostic):
    title: ClassVar[str] = "the model's forward called `{found}` where it called `{expected}` when it was cut"
    help: ClassVar[str] = "its calls must follow from the shapes of its arguments; or train it as one stage"
    found: str
    expected: str


@dataclass(frozen=True)
class ChangedInPlace(Diagnostic):
    title: ClassVar[str] = "the model changes what `{path}` returned in place, and a later stage needs it as it was"
    help: ClassVar[str] = "write `x = x + y` for `x += y` there, or cut the model elsewhere"
    path: str


class _StageEnd(BaseException):
    """Leaves the model's forward at the first unit of a later stage; no ``except Exception`` of a model stops it."""


def parts_of(module: Module) -> tuple[Stage, ...]:
    """The stages of a module's pipeline, in order; none where the model is one stage."""
    return tuple(stage for stage in module.stages if "part_of" in stage.attrs)


@dataclass
class Cuts:
    """The cut model at every shape of micro-batch: from its forward on the meta device, run once per shape."""

    model_file: ModelFile
    training: Training
    parts: tuple[tuple[str, ...], ...]
    _model: list[nn.Module] = field(default_factory=list)
    _repeats: list[Repeats] = field(default_factory=list)
    _encoders: dict[str, nn.Module] = field(default_factory=dict)
    _known: dict[tuple[object, ...], Cut] = field(default_factory=dict)

    @classmethod
    def of(cls, model_file: ModelFile, training: Training, stages: Sequence[Stage]) -> Cuts:
        return cls(model_file, training, tuple(tuple(path for path, _ in layers_of(stage)) for stage in stages))

    @property
    def model(self) -> nn.Module:
        """On the meta device."""
        if not self._model:
            with META:
                self._model.append(build_model(self.model_file, self.training, META))
            self._encoders.update(meta_encoders(self.model_file))
            self._repeats.append(Repeats(self._model[0], find_blocks(self._model[0])))
        return self._model[0]

    def at(self, clip: VideoClip, batch: int) -> Cut:
        """For micro-batches of so many clips like this one."""
        key = *clip.shape, batch
        if key not in self._known:
            model = self.model
            dtype = None if self.training.dtype == "fp32" else DTYPES[self.training.dtype]
            source = CastSamples(self.model_file, dtype)
            arguments = tiled(arguments_of(source, clip, self._encoders, device="meta"), batch)
            blocks = [path for part in self.parts for path in part]
            flow = record_dataflow(model, blocks, arguments, prediction_of, self._repeats[0])
            self._known[key] = Cut(flow, self.parts)
        return self._known[key]


@dataclass(frozen=True, eq=False)
class StageRun:
    """One stage's forward of one micro-batch: what it was given, and its outputs; both still in autograd's graph."""

    given: Mapping[Output, Tensor]
    outputs: Mapping[Output, Tensor]  # what goes on to the next stage
    prediction: Tensor | None  # of the last stage


def whole(output: Output, value: Tensor) -> Tensor:
    """All of a value: where ranks share a sequence, each has its tokens of what a block made."""
    gathered = getattr(value, "gathered", None)
    return value if gathered is None else gathered()


def run_stage(
    model: nn.Module,
    cut: Cut,
    stage: int,
    arguments: Mapping[str, Any],
    given: Mapping[Output, Tensor],
    handing: Callable[[Output, Tensor], Tensor] = whole,
) -> StageRun:
    """The forward of ``stage`` alone, on the device of ``model``. ``given`` is all that the stage before handed on,
    ``handing`` makes of a value what goes on to the next.

    Raises ``UserError`` for a forward that does not call what it called when it was cut.
    """
    walk = _Walk(cut, stage, given, next(model.parameters()).device)
    units = {path: model.get_submodule(path) for path in cut.flow.units}
    output: Any = None
    with replaced({path: (unit, walk.instead(path, unit)) for path, unit in units.items()}), suppress(_StageEnd):
        output = model(**arguments)
    last = stage == len(cut.parts) - 1
    return StageRun(given, {} if last else walk.handed_on(handing), prediction_of(output) if last else None)


@dataclass
class _Walk:
    """One forward on its way through the units."""

    cut: Cut
    stage: int
    given: Mapping[Output, Tensor]
    device: torch.device
    outputs: dict[Output, tuple[Tensor, int]] = field(default_factory=dict)  # with its version when it was made
    at: int = 0
    inside: bool = False

    def instead(self, path: str, unit: nn.Module) -> Callable[..., Any]:
        forward = unit.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return forward(*args, **kwargs)
            number, calls = self.at, self.cut.flow.calls
            self.at += 1
            if number >= len(calls) or calls[number].path != path:
                expected = calls[number].path if number < len(calls) else "its end"
                raise UserError(OtherForward(None, path, expected))
            if self.cut.stages[number] > self.stage:
                raise _StageEnd
            if self.cut.stages[number] < self.stage:
                return self._aside(number, args, kwargs)
            self.inside = True
            try:
                output = forward(*args, **kwargs)
            finally:
                self.inside = False
            for leaf, value in enumerate(pytree.tree_leaves(output)):
                if isinstance(value, Tensor):
                    self.outputs[Output(number, leaf)] = value, value._version
            return output

        return run

    def _aside(self, number: int, args: Any, kwargs: Any) -> Any:
        """What a unit of an earlier stage returned, as far as it is needed here."""
        call = self.cut.flow.calls[number]
        own = pytree.tree_leaves((args, kwargs))
        leaves = []
        for leaf, result in enumerate(call.results):
            if isinstance(result, Given):
                leaves.append(own[result.leaf])
            elif isinstance(result, Form):
                value = self.given.get(Output(number, leaf))
                leaves.append(zeros(result.shape, result.dtype, self.device) if value is None else value)
            else:
                leaves.append(result)
        return pytree.tree_unflatten(leaves, call.spec)

    def handed_on(self, handing: Callable[[Output, Tensor], Tensor]) -> dict[Output, Tensor]:
        values: dict[Output, Tensor] = {}
        for output in self.cut.handed_on(self.stage):
            if output in self.given:
                values[output] = handing(output, self.given[output])
                continue
            value, version = self.outputs[output]
            if value._version != version:
                raise UserError(ChangedInPlace(None, self.cut.flow.calls[output.call].path))
            values[output] = handing(output, value)
        return values


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take no memory."""
    return torch.zeros((), dtype=dtype, device=device).expand(tuple(shape))
