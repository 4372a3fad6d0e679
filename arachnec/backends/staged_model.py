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

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from arachnec.backends.cascade_step import DTYPES, build_model
from arachnec.data.clip import VideoClip
from arachnec.executable.training_options import Training
from arachnec.ir.diagnostic import user_error
from arachnec.ir.nodes import Module, Stage
from arachnec.ir.stage_sizes import layers_of
from arachnec.models.batch import prediction_of
from arachnec.models.file import ModelFile
from arachnec.models.precision import CastSamples
from arachnec.tracing.dataflow import Cut, Form, Given, Output, UnitCall, record_dataflow, replaced
from arachnec.tracing.find import find_blocks
from arachnec.tracing.record import Repeats
from arachnec.tracing.sample import arguments_of, meta_encoders, tiled

META = torch.device("meta")
TRY_S = 30.0  # of compiling, for cutting the model at the clips' shapes


class _StageEnd(BaseException):
    """Leaves the model's forward at the first unit of a later stage; no ``except Exception`` of a model stops it."""


def parts_of(module: Module) -> tuple[Stage, ...]:
    """The stages of a module's pipeline, in order; none where the model is one stage."""
    return tuple(stage for stage in module.stages if "part_of" in stage.attrs)


def demand_own_parameters(
    module: Module, model_file: ModelFile, training: Training, clips: Sequence[VideoClip], most_s: float = TRY_S
) -> None:
    """Raises ``UserError`` where a later stage reads parameters for some clips alone: its ranks lack them.

    Every distinct shape is run on the meta device, until ``most_s`` seconds have gone by; ranks try the rest.
    """
    stages = parts_of(module)
    if len(stages) < 2:
        return
    cuts, started = Cuts.of(model_file, training, stages), time.perf_counter()
    shapes: dict[tuple[int, ...], VideoClip] = {}
    for clip in clips:
        shapes.setdefault(clip.shape, clip)
    for clip in shapes.values():
        cuts.at(clip, 1)
        if time.perf_counter() - started > most_s:
            return


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
    _forwards: dict[tuple[Cut, int], StageForward] = field(default_factory=dict)

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
            self._known[key] = self._cut(model, tiled(arguments_of(source, clip, self._encoders, device="meta"), batch))
        return self._known[key]

    def of_arguments(self, arguments: Mapping[str, Any]) -> Cut:
        """For a call with such arguments, whoever made them."""
        leaves, spec = pytree.tree_flatten(dict(arguments))
        key = (
            str(spec),
            *((tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves),
        )
        if key not in self._known:
            on_meta = pytree.tree_map_only(Tensor, lambda value: value.to(META), dict(arguments))
            self._known[key] = self._cut(self.model, on_meta)
        return self._known[key]

    def _cut(self, model: nn.Module, arguments: Mapping[str, Any]) -> Cut:
        blocks = [path for part in self.parts for path in part]
        cut = Cut(record_dataflow(model, blocks, arguments, prediction_of, self._repeats[0]), self.parts)
        self._demand_own_parameters(cut)
        return cut

    def _demand_own_parameters(self, cut: Cut) -> None:
        """Raises ``UserError`` where a stage reads parameters that it did not read at the first cut: its ranks have
        zeros in their place. The first stage has those that nobody read."""
        known = next(iter(self._known.values()), cut).parameters
        if cut.parameters == known:
            return
        read = frozenset().union(*known)
        for stage, (own, names) in enumerate(zip(known, cut.parameters, strict=True)):
            missing = names - own if stage else (names - own) & read
            if missing:
                absent = min(missing)
                raise user_error(
                    f"for some clips stage {stage} reads `{absent}`, which it does not have",
                    help=(
                        f"a stage has the parameters that it reads for the first clip: make `{absent}` part of a "
                        "block, read it for every clip, or train the model as one stage"
                    ),
                )

    def forward(self, model: nn.Module, cut: Cut, stage: int) -> StageForward:
        """Of the one model with values that these cuts are for."""
        if (cut, stage) not in self._forwards:
            self._forwards[cut, stage] = StageForward(model, cut, stage)
        return self._forwards[cut, stage]


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


class StageForward:
    """The forward of one stage of ``model`` at one cut: made once, called for every micro-batch."""

    def __init__(self, model: nn.Module, cut: Cut, stage: int) -> None:
        self._model, self._cut, self._stage = model, cut, stage
        self._last = stage == len(cut.parts) - 1
        self._device = next(model.parameters()).device
        self._calls = [_Call(number, call) for number, call in enumerate(cut.flow.calls)]
        self._handed_on = cut.handed_on(stage)
        self._units = {path: _Unit(self, path, model.get_submodule(path)) for path in cut.flow.units}
        # of one micro-batch
        self._given: Mapping[Output, Tensor] = {}
        self._outputs_here: dict[Output, tuple[Tensor, int]] = {}  # with its version when it was made
        self._at = 0
        self._inside = False

    def __call__(
        self,
        arguments: Mapping[str, Any],
        given: Mapping[Output, Tensor],
        handing: Callable[[Output, Tensor], Tensor] = whole,
    ) -> StageRun:
        """The forward of the stage alone, on the device of the model. ``given`` is all that the stage before handed on,
        ``handing`` makes of a value what goes on to the next.

        Raises ``UserError`` for a forward that does not call what it called when it was cut.
        """
        self._given, self._outputs_here, self._at, self._inside = given, {}, 0, False
        for unit in self._units.values():
            unit.forward = unit.module.forward  # whoever else replaced it
        output: Any = None
        try:
            with replaced({path: (unit.module, unit) for path, unit in self._units.items()}), suppress(_StageEnd):
                output = self._model(**arguments)
            prediction = prediction_of(output) if self._last else None
            return StageRun(given, {} if self._last else self._outputs(handing), prediction)
        finally:
            self._given, self._outputs_here = {}, {}

    def enter(self, unit: _Unit, args: Any, kwargs: Any) -> Any:
        """A call of a unit, by the model or from within another unit."""
        if self._inside:
            return unit.forward(*args, **kwargs)
        number = self._at
        self._at += 1
        if number >= len(self._calls) or self._calls[number].path != unit.path:
            expected = self._calls[number].path if number < len(self._calls) else "its end"
            raise user_error(
                f"the model's forward called `{unit.path}` where it called `{expected}` when it was cut",
                help="its calls must follow from the shapes of its arguments; or train it as one stage",
            )
        stage, call = self._cut.stages[number], self._calls[number]
        if stage > self._stage:
            raise _StageEnd
        if stage < self._stage:
            return call.aside(self._given, args, kwargs, self._device)
        self._inside = True
        try:
            with _kept():
                output = unit.forward(*args, **kwargs)
        finally:
            self._inside = False
        leaves = (output,) if isinstance(output, Tensor) else pytree.tree_leaves(output)
        for name, value in zip(call.outputs, leaves, strict=False):
            if isinstance(value, Tensor):
                self._outputs_here[name] = value, value._version
        return output

    def _outputs(self, handing: Callable[[Output, Tensor], Tensor]) -> dict[Output, Tensor]:
        values: dict[Output, Tensor] = {}
        for output in self._handed_on:
            if output in self._given:
                values[output] = handing(output, self._given[output])
                continue
            value, version = self._outputs_here[output]
            if value._version != version:
                raise user_error(
                    f"the model changes what `{self._calls[output.call].path}` returned in place, and a later stage "
                    "needs it as it was",
                    help="write `x = x + y` for `x += y` there, or cut the model elsewhere",
                )
            values[output] = handing(output, value)
        return values


class _Unit:
    """Stands in the place of a unit's forward."""

    def __init__(self, stage: StageForward, path: str, module: nn.Module) -> None:
        self.path, self.module = path, module
        self.forward: Callable[..., Any] = module.forward
        self._stage = stage

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._stage.enter(self, args, kwargs)


class _Call:
    """A call of the forward, and what stands for it where its unit is of an earlier stage."""

    def __init__(self, number: int, call: UnitCall) -> None:
        self.path = call.path
        self.outputs = tuple(Output(number, leaf) for leaf in range(len(call.results)))
        self._results, self._spec = call.results, call.spec
        self._reads_arguments = any(isinstance(result, Given) for result in call.results)
        self._zeros: dict[int, Tensor] = {}

    def aside(self, given: Mapping[Output, Tensor], args: Any, kwargs: Any, device: torch.device) -> Any:
        """What the unit returned, as far as it is needed here."""
        own = pytree.tree_leaves((args, kwargs)) if self._reads_arguments else ()
        leaves: list[Any] = []
        for leaf, (name, result) in enumerate(zip(self.outputs, self._results, strict=True)):
            if isinstance(result, Given):
                leaves.append(own[result.leaf])
            elif not isinstance(result, Form):
                leaves.append(result)
            elif name in given:
                leaves.append(given[name])
            else:
                if leaf not in self._zeros:
                    self._zeros[leaf] = zeros(result.shape, result.dtype, device)
                leaves.append(self._zeros[leaf])
        return pytree.tree_unflatten(leaves, self._spec)


def _kept() -> AbstractContextManager[Any]:
    """Inside, what autograd saves is kept, also where the model's own forward has checkpointed the call: to run it
    again behind the stage's forward would run another function, with other stages' units in the way. Which blocks are
    run again is the plan's."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if not hooks or getattr(hooks[0], "__module__", "") != "torch.utils.checkpoint":
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(_same, _same)


def _same(value: Tensor) -> Tensor:
    return value


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that take no memory."""
    return torch.zeros((), dtype=dtype, device=device).expand(tuple(shape))
