"""The state of a run's optimizer on every rank: counted into the plan, and as tensors that a checkpoint writes.

torch makes a parameter's state at its first gradient. A checkpoint needs the tensors before that, so they are made like
those of an update tried before (``arachnec.optimizers.state``); where nothing was read into them, torch makes its own.

``trace`` counts AdamW's two moments, and masters of low-precision parameters. Here stand the options' optimizer and its
averages in their place. An optimizer that needs whole tensors says of no part of it that it may lie on one rank alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from arachnec.executable.training_options import OWN_OPTIMIZER, Training
from arachnec.ir.diagnostic import user_error
from arachnec.ir.nodes import Module, Stage
from arachnec.ir.state_placement import with_kept
from arachnec.models.file import ModelFile
from arachnec.optimizers.recipe import ParameterGroup, Recipe, recipe_of
from arachnec.optimizers.schedules import Rates, demand_schedule
from arachnec.optimizers.state import AVERAGE, kept_state, most_kept, state_bytes

PROBE = (3,)  # the shape of a tensor that stands for all: an update element by element keeps 3 or 1 of everything
WATCHED = 2  # updates after which all of its state is held to what was expected; later what is new in it
UPDATES = ""  # key of a count of a parameter's updates, where its state has none
STEP = "step"  # scalars have this kind, or one that begins so: ``CellParameters.parts`` knows them by it


@dataclass
class KeptState:
    """The state of the masters that ``optimizer`` updates. ``groups`` are those of ``recipe``, as torch has them."""

    recipe: Recipe
    groups: tuple[ParameterGroup, ...]
    optimizer: Optimizer
    _like: dict[object, dict[str, Any]] = field(default_factory=dict)
    _scalars: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # that are no tensors in torch's state
    _handed_out: bool = False
    _updates: int = 0

    def of(self, name: str, master: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The state of one master: tensors of many elements, and scalars as tensors of one, over the memory in use."""
        self._handed_out = True
        like, held = self._expected(name, master), self.optimizer.state[master]
        if held:
            self._demand(name, master)
        for key, value in like.items():
            if key not in held or held[key] is None:
                held[key] = self._empty(name, value, master)
        own = self._scalars.setdefault(name, {})
        elements: dict[str, Tensor] = {}
        scalars: dict[str, Tensor] = {}
        for key, value in like.items():
            kind = key if key == STEP and _counts(like) else f"{STEP}.{key}"
            if not isinstance(value, Tensor):
                own[key] = torch.tensor([float(held[key])], dtype=torch.float64)
                scalars[kind] = own[key]
            elif self._is_scalar(value):
                scalars[kind] = held[key].view(1)
            else:
                held[key] = held[key].contiguous()
                elements[key] = held[key]
        if not _counts(like):
            scalars[STEP] = own.setdefault(UPDATES, torch.zeros(1))
        return elements, scalars

    def settle(self, masters: Mapping[str, Tensor]) -> None:
        """Before an update: what was handed out is in use again, as it was read or as it was."""
        if not self._handed_out:
            return
        self._handed_out = False
        for name, master in masters.items():
            held, own = self.optimizer.state[master], self._scalars.get(name, {})
            like = self._expected(name, master)
            count = (own[STEP] if STEP in own else held.get(STEP, 0)) if _counts(like) else own.get(UPDATES, 0)
            if not float(count):
                self.optimizer.state.pop(master, None)
                continue
            for key, value in like.items():
                if not isinstance(value, Tensor):
                    held[key] = type(value)(own[key].item())

    def expect(self, masters: Mapping[str, Tensor]) -> None:
        """Measure what will be kept, so that no update waits for that."""
        for name, master in masters.items():
            self._expected(name, master)

    def updated(self, masters: Mapping[str, Tensor]) -> None:
        """After an update. Raises ``UserError`` for state that was not expected."""
        self._updates += 1
        for name, master in masters.items():
            if master.grad is None:
                continue
            like = self._expected(name, master)
            if not _counts(like):
                self._scalars.setdefault(name, {}).setdefault(UPDATES, torch.zeros(1)).add_(1)
            if self._updates <= WATCHED or not self.optimizer.state[master].keys() <= like.keys():
                self._demand(name, master)

    def _expected(self, name: str, master: Tensor) -> dict[str, Any]:
        number = self._numbers[name]
        shape = PROBE if self.recipe.elementwise else tuple(master.shape)
        key = number, shape, master.dtype
        if key not in self._like:
            state = kept_state(self.recipe, self.groups[number], shape, master.dtype)
            self._like[key] = {k: v for k, v in state.items() if v is not None}
        return self._like[key]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """The group of every parameter."""
        return {name: number for number, group in enumerate(self.groups) for name in group.names}

    def _is_scalar(self, like: Tensor) -> bool:
        return like.numel() == 1 if self.recipe.elementwise else like.ndim == 0

    def _empty(self, name: str, like: Any, master: Tensor) -> Any:
        if not isinstance(like, Tensor):
            return like
        arguments = self.groups[self._numbers[name]].arguments
        counted_there = arguments.get("fused") or arguments.get("capturable")
        device = torch.device("cpu") if like.ndim == 0 and not counted_there else master.device
        if self.recipe.elementwise and not self._is_scalar(like):
            return torch.zeros(master.shape, dtype=like.dtype, device=device)
        return torch.zeros(like.shape, dtype=like.dtype, device=device)

    def _demand(self, name: str, master: Tensor) -> None:
        like, held = self._expected(name, master), self.optimizer.state[master]
        for key, value in held.items():
            expected = like.get(key)
            # a single number, as of a parameter of zeros, for all of a tensor
            if expected is not None and _stands_for(value, expected):
                value = held[key] = value.to(master.device).expand(expected.shape).contiguous()
            if value is None or (key in like and self._fits(value, expected, master)):
                continue
            raise user_error(
                f"{self.recipe.name} keeps `{key}` of {name}, {_shown(value)}, where {_shown(expected)} was counted "
                "before",
                help=(
                    "memory was proved for what one update leaves behind: keep the same tensors from the first update "
                    "on, or take another optimizer; a schedule that sets momentum wants an optimizer that has it; "
                    "checkpoints written before are whole"
                ),
            )

    def _fits(self, value: Any, like: Any, master: Tensor) -> bool:
        if not isinstance(value, Tensor) or not isinstance(like, Tensor):
            return isinstance(value, int | float) and isinstance(like, int | float)
        if self.recipe.elementwise and not self._is_scalar(like):
            return value.shape == master.shape and value.dtype == like.dtype
        return value.shape == like.shape and value.dtype == like.dtype


def _counts(like: Mapping[str, Any]) -> bool:
    """Whether a parameter's state says how often it was updated: its `step` is not 0 behind one update."""
    step = like.get(STEP)
    return step is not None and ((isinstance(step, Tensor) and step.is_meta) or bool(step))


def _stands_for(value: Any, expected: Any) -> bool:
    both = isinstance(value, Tensor) and isinstance(expected, Tensor)
    return both and value.ndim == 0 and expected.ndim > 0 and value.dtype == expected.dtype


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return "nothing" if value is None else type(value).__name__


GIB = 2**30
MASTER = 8  # bytes, of parameters below fp32: the fp32 copy that is updated, and the gradient it is updated with
PARTS = {
    "sharded": "its state is dealt out over ranks (shard-optimizer)",
    "cell": "parameters are dealt out over cells of ranks",
    "part_of": "the model is cut into stages",
    "host": "its state lies in host memory",
}


def recipe_for(parameters: Mapping[str, Tensor], model_file: ModelFile, training: Training) -> Recipe:
    """What updates these parameters of a model, all that train, whole; on the meta device is enough.

    Raises ``UserError`` for options that they cannot be trained with.
    """
    recipe = recipe_of(parameters, training, model_file.optimizer, model_file.span("optimizer"))
    arguments = [group.arguments for group in recipe.groups]
    demand_schedule(training.schedule, arguments)
    if training.schedule.scheduler is None:
        return recipe
    # a schedule that sets momentum makes an optimizer keep a tensor for it, from the first update on
    moved = Rates(training.schedule, arguments).at(0)
    groups = (
        replace(group, arguments={**group.arguments, **rates, "lr": group.arguments["lr"]})
        for group, rates in zip(recipe.groups, moved, strict=True)
    )
    return replace(recipe, groups=tuple(groups))


def with_optimizer(stage: Stage, model: nn.Module, training: Training, recipe: Recipe) -> Stage:
    """A trained stage as ``trace`` made it, its state that of this recipe and these options."""
    if training == msgspec.structs.replace(training, optimizer=OWN_OPTIMIZER, groups=(), ema=0.0) and _is_own(recipe):
        return stage
    parameters = _trained(model)
    averages = AVERAGE if training.ema else 0
    if recipe.elementwise:
        kept, once = most_kept(parameters, recipe)
        return with_kept(stage, kept + averages, once)
    whole = kept_bytes(parameters, training, recipe)
    return with_kept(replace(stage, attrs=stage.attrs.updated(optimizer=None)), 0, 0, whole)


def kept_bytes(parameters: Mapping[str, Tensor], training: Training, recipe: Recipe) -> int:
    """Bytes of the optimizer's own state and of the averages."""
    averages = AVERAGE * sum(value.numel() for value in parameters.values()) if training.ema else 0
    return state_bytes(parameters, recipe) + averages


def more_state(
    model_file: ModelFile, compiled: tuple[nn.Module, Training], running: tuple[nn.Module, Training]
) -> float:
    """GiB that a run takes beyond what it was compiled for, with other options, on a rank that holds everything.

    Each is the model in the precision of its options, on the meta device.
    """
    before, after = (_whole_bytes(model, model_file, training) for model, training in (compiled, running))
    return max(0.0, (after - before) / GIB)


def demand_whole_tensors(module: Module, recipe: Recipe) -> None:
    """Raises ``UserError`` where a plan deals out what the optimizer needs whole."""
    if recipe.elementwise:
        return
    for stage in module.stages:
        for attribute, reason in PARTS.items():
            if stage.trained and attribute in stage.attrs:
                raise user_error(
                    f"{recipe.name} updates whole tensors, and of @{stage.name} {reason}",
                    help=(
                        "an update of a part is not that part of its update; take an elementwise optimizer such as "
                        "AdamW, devices that hold the whole state, or `--passes` without what deals it out"
                    ),
                )


def _whole_bytes(model: nn.Module, model_file: ModelFile, training: Training) -> int:
    parameters = _trained(model)
    kept = kept_bytes(parameters, training, recipe_for(parameters, model_file, training))
    return resident_bytes(model) + MASTER * sum(p.numel() for p in parameters.values() if p.dtype.itemsize < 4) + kept


def resident_bytes(model: nn.Module) -> int:
    """Bytes on every rank that computes: parameters, gradients of the trained ones, buffers."""
    parameters = sum(p.numel() * p.dtype.itemsize * (2 if p.requires_grad else 1) for p in model.parameters())
    return parameters + sum(b.numel() * b.dtype.itemsize for b in model.buffers())


def _is_own(recipe: Recipe) -> bool:
    return recipe.kind is not None and recipe.kind.__name__ == OWN_OPTIMIZER.name


def _trained(model: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in model.named_parameters() if value.requires_grad}
